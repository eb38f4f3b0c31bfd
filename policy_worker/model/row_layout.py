"""Layout of a packed row, and the forms of it that attention asks for: blocks of sequences of
similar length, or what one mask is made of. A form is made when the first layer asks for it.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from paceline.process.compute_device import to_device
from policy_worker.objectives.batch import Ints

BLOCK_SCORES = {"cpu": 4096}
"""Scores of padding that take about as long as another attention block, by device. Measured with
a small model: 2,000 to 8,000 are equally fast."""
GPU_BLOCK_SCORES = 1 << 20
"""The same on other devices, which wait for kernels rather than for scores. Estimated from the time
of a kernel's launch, not measured."""


@dataclass(frozen=True, slots=True)
class Block:
    """Sequences that attend together: ``gather`` is int64 [N * L], positions in the row."""

    gather: Tensor
    sequences: int
    length: int


@dataclass(frozen=True, slots=True)
class Forest:
    """Runs of tokens that make up a row: prompts, and the own tokens of sequences. A path is what
    the model has seen at the end of a run: the part of its parent's path that it shares, and its
    own tokens. Depth first: a run, then those that go on from its end, then those that leave it
    earlier. Arrays are [N].

        run        p p p p a a a a b b c c c      c leaves a after its first two tokens
        position   0 1 2 3 4 5 6 7 4 5 6 7 8      b goes on from p, as a does; c lies before b:
        row        p p p p a a a a c c c b b
    """

    parent: Ints
    """-1: none."""
    prefix: Ints
    """Tokens of its path before its own. More than its parent's, and 0 without a parent."""
    inputs: Ints
    """Tokens of its own that are asked for."""
    tokens: Ints
    """Own tokens that are in the row: what goes on from it needs them, too."""
    start: Ints
    """Place in the row of the first of them."""
    size: Ints
    """Tokens of it and of all that goes on from it."""
    eldest: np.ndarray
    """True for the run that lies first of those that go on from its parent."""

    @classmethod
    def planted(cls, parent: Ints, prefix: Ints, inputs: Ints, order: Ints) -> "Forest":
        """``order`` decides between runs that leave their parent at the same place."""
        child = np.flatnonzero(parent >= 0)
        above = parent[child]
        tokens = inputs.copy()
        np.maximum.at(tokens, above, prefix[child] - prefix[above])
        size, levels = tokens.copy(), _levels(parent)
        for level in reversed(levels):
            np.add.at(size, parent[level], size[level])
        laid = np.lexsort((order, -prefix, parent))
        before = np.cumsum(size[laid]) - size[laid]
        first = np.r_[True, parent[laid][1:] != parent[laid][:-1]]
        start, eldest = np.empty_like(parent), np.empty(len(parent), np.bool_)
        start[laid] = (
            before - before[np.maximum.accumulate(np.where(first, np.arange(len(laid)), 0))]
        )
        eldest[laid] = first & (parent[laid] >= 0)
        for level in levels:
            start[level] += (start + tokens)[parent[level]]
        return cls(parent, prefix, inputs, tokens, start, size, eldest)

    @property
    def total(self) -> int:
        """Tokens of the row."""
        return int(self.tokens.sum())

    def places(self, run: Ints, at: Ints) -> Ints:
        """Places in the row of the tokens ``at`` of the paths of ``run``, broadcast."""
        found = at + (self.start[run] - self.prefix[run])
        while (prefix := self.prefix[run]).any():
            run = np.where(prefix > 0, self.parent[run], run)
            found = np.where(at < prefix, at + (self.start[run] - self.prefix[run]), found)
        return found

    def computed_from(self, run: Ints, asked: np.ndarray) -> Ints:
        """The token of each path of ``run`` from which on it is computed there: what lies before is
        computed in another path. ``asked`` [N]: True for each of ``run``."""
        found = self.prefix[run]
        leads = self.eldest[run]
        while leads.any():
            run = np.where(leads, self.parent[run], run)
            done = self.prefix[run] + self.inputs[run]
            found = np.where(leads, np.minimum(found, done), found)
            leads = leads & ~asked[run] & self.eldest[run]
        return found

    @property
    def seen_until(self) -> Ints:
        """[T]: the place from which on no token of the row sees this one."""
        child = np.flatnonzero(self.parent >= 0)
        above = self.parent[child]
        last_seen = self.start[above] + self.prefix[child] - self.prefix[above] - 1
        leaving = np.bincount(last_seen, self.size[child], self.total).astype(np.int64)
        gone = np.r_[0, np.cumsum(leaving)]  # behind those that leave before a place
        place, _ = ranges(self.start, self.tokens)
        until = np.empty(self.total, np.int64)
        until[place] = np.repeat(self.start + self.size + gone[self.start], self.tokens)
        until -= gone[:-1]
        return until


def _levels(parent: Ints) -> list[Ints]:
    """Runs by their distance from one without a parent: those at 1, at 2, and so on."""
    depth, above = np.zeros_like(parent), parent
    while (goes_on := above >= 0).any():
        depth += goes_on
        above = np.where(goes_on, parent[above], -1)
    return [np.flatnonzero(depth == d) for d in range(1, int(depth.max()) + 1)]


@dataclass(eq=False)
class Packing:
    """Layout of a row of S sequences."""

    forest: Forest
    sequences: Ints
    """[S], the run of each sequence."""
    position: Tensor
    """int64 [T], on the device: position of each token in its path."""
    routes: Tensor | None = None
    """int64 [T, W]: experts to which each token goes, layer after layer; -1 for the router's own
    choice. None: the router chooses all."""
    follows: bool = True
    """The model that computes the row next follows ``routes``, which the policy's engine chose."""
    agreement: list[Tensor] = field(default_factory=list)
    """float32 [2] of each layer that was told its experts: those its router would have taken, and
    all."""
    masks: dict[Any, Any] = field(default_factory=dict)
    """Masks that attention has made of the row, for the other layers."""

    @cached_property
    def full(self) -> Ints:
        """[S], tokens of each sequence that are in the row, with its prefix."""
        found: Ints = (self.forest.prefix + self.forest.inputs)[self.sequences]
        return found

    @cached_property
    def blocks(self) -> tuple[tuple[Block, ...], Tensor]:
        """The blocks, and int64 [T]: for each row token, the index of its output in the
        concatenation of all blocks' [N * L] outputs."""
        collapse = np.empty(len(self.position), dtype=np.int64)
        grids: list[Ints] = []
        offset = 0
        scores = BLOCK_SCORES.get(self.position.device.type, GPU_BLOCK_SCORES)
        asked = np.zeros(len(self.forest.parent), np.bool_)
        asked[self.sequences] = True
        # Of what several sequences share, the output is taken from one, all copies being equal.
        own_from = self.forest.computed_from(self.sequences, asked)
        for members in similar(self.full, scores):
            grid = np.arange(int(self.full[members].max()))[None, :]
            n = self.full[members][:, None]
            gather = self.forest.places(self.sequences[members][:, None], grid)
            real = grid < n
            slot = offset + np.arange(gather.size).reshape(gather.shape)
            own = real & (grid >= own_from[members][:, None])
            collapse[gather[own]] = slot[own]
            # Padding repeats the sequence's last token: a real row position, spread over the row.
            last = gather[np.arange(len(members)), n[:, 0] - 1][:, None]
            grids.append(np.where(real, gather, last))
            offset += gather.size
        places, *gathers = to_device([collapse, *map(np.ravel, grids)], self.position.device)
        pairs = zip(gathers, grids, strict=True)
        return tuple(Block(gather, *grid.shape) for gather, grid in pairs), places

    @cached_property
    def seen_until(self) -> Tensor:
        """int64 [T], on the device: a token sees those before it for which it lies before this."""
        (found,) = to_device([self.forest.seen_until], self.position.device)
        return found


def similar(full: Ints, block_scores: int) -> list[Ints]:
    """Members of each block: the split by length with the fewest scores, padding included, if
    each block costs ``block_scores`` more."""
    lengths, counts = np.unique(full, return_counts=True)
    until = np.r_[0, np.cumsum(counts)]
    fewest, begins = np.zeros(len(lengths) + 1), np.zeros(len(lengths), dtype=np.int64)
    for last, length in enumerate(lengths):
        sequences = until[last + 1] - until[: last + 1]
        scores = fewest[: last + 1] + sequences * float(length) ** 2 + block_scores
        begins[last] = scores.argmin()
        fewest[last + 1] = scores.min()
    blocks: list[Ints] = []
    last = len(lengths) - 1
    while last >= 0:
        first = begins[last]
        blocks.append(np.flatnonzero((full >= lengths[first]) & (full <= lengths[last])))
        last = first - 1
    return blocks[::-1]


def ranges(starts: Ints, lengths: Ints) -> tuple[Ints, Ints]:
    """Concatenation of ``range(s, s + n)``, and each element's place in its range."""
    ends = np.cumsum(lengths)
    within = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - lengths, lengths)
    return np.repeat(starts, lengths) + within, within
