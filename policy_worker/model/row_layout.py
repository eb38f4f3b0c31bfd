"""Layout of a packed row, and the forms of it that attention asks for: blocks of sequences of
similar length, or a pattern for one mask. A form is made when the first layer asks for it.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

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
class RowPattern:
    """The tokens of a row of T that see each other. int64 [T] each."""

    group: Tensor
    sequence: Tensor
    """-1 for a token of a prompt, which all completions of its group see."""
    position: Tensor
    masks: dict[Any, Any] = field(default_factory=dict)
    """Masks that attention derives from the pattern, for the other layers of the row."""


class Sequences(NamedTuple):
    """N sequences side by side: where each begins and the last one ends, int32 [N + 1], and the
    longest one's length, of queries and of keys."""

    queries: Tensor
    keys: Tensor
    longest_queries: int
    longest_keys: int


@dataclass(frozen=True, slots=True)
class RowParts:
    """A row's attention in two parts: each prompt and completion with itself, and the completions
    of each group with their prompt."""

    itself: Sequences
    shared: Sequences | None
    """None if no completion has a token that attends."""
    completions: Tensor
    """int64, places in the row of the queries of ``shared``."""
    prompts: Tensor
    """The same of its keys."""


@dataclass(eq=False)
class Packing:
    """Layout of a row of S sequences: [prompt, its completions, prompt, ...]. Arrays are [S]."""

    prompt_start: Ints
    """Place in the row of the prompt of the sequence's group."""
    prompt: Ints
    """Length of that prompt."""
    row_start: Ints
    """Place in the row of the sequence's own tokens."""
    inputs: Ints
    """Tokens of its own that are in the row."""
    first: np.ndarray
    """True for the sequence that its group's prompt precedes."""
    position: Tensor
    """int64 [T], on the device: position of each token in its sequence."""
    routes: Tensor | None = None
    """int64 [T, W]: experts to which each token goes, layer after layer; -1 for the router's own
    choice. None: the router chooses all."""
    follows: bool = True
    """The model that computes the row next follows ``routes``, which the policy's engine chose."""
    agreement: list[Tensor] = field(default_factory=list)
    """float32 [2] of each layer that was told its experts: those its router would have taken, and
    all."""

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence, its prompt included."""
        return int((self.prompt + self.inputs).max())

    @cached_property
    def blocks(self) -> tuple[tuple[Block, ...], Tensor]:
        """The blocks, and int64 [T]: for each row token, the index of its output in the
        concatenation of all blocks' [N * L] outputs."""
        full = self.prompt + self.inputs
        collapse = np.empty(len(self.position), dtype=np.int64)
        grids: list[Ints] = []
        offset = 0
        scores = BLOCK_SCORES.get(self.position.device.type, GPU_BLOCK_SCORES)
        for members in similar(full, scores):
            grid = np.arange(int(full[members].max()))[None, :]
            p, n = self.prompt[members][:, None], full[members][:, None]
            gather = np.where(
                grid < p,
                self.prompt_start[members][:, None] + grid,
                self.row_start[members][:, None] + grid - p,
            )
            real = grid < n
            slot = offset + np.arange(gather.size).reshape(gather.shape)
            # A prompt's output is taken from the first sequence of its group, all copies being
            # equal.
            own = real & ((grid >= p) | self.first[members][:, None])
            collapse[gather[own]] = slot[own]
            # Padding repeats the sequence's last token: a real row position, spread over the row.
            last = gather[np.arange(len(members)), n[:, 0] - 1][:, None]
            grids.append(np.where(real, gather, last))
            offset += gather.size
        places, *gathers = to_device([collapse, *map(np.ravel, grids)], self.position.device)
        pairs = zip(gathers, grids, strict=True)
        return tuple(Block(gather, *grid.shape) for gather, grid in pairs), places

    @cached_property
    def pattern(self) -> RowPattern:
        heads, number = np.flatnonzero(self.first), np.cumsum(self.first) - 1
        prompts, _ = ranges(self.prompt_start[heads], self.prompt[heads])
        completions, _ = ranges(self.row_start, self.inputs)
        group, sequence = np.empty((2, len(self.position)), dtype=np.int64)
        group[prompts], sequence[prompts] = np.repeat(number[heads], self.prompt[heads]), -1
        group[completions] = np.repeat(number, self.inputs)
        sequence[completions] = np.repeat(np.arange(len(number)), self.inputs)
        groups, sequences = to_device([group, sequence], self.position.device)
        return RowPattern(groups, sequences, self.position)

    @cached_property
    def parts(self) -> RowParts:
        heads, number = np.flatnonzero(self.first), np.cumsum(self.first) - 1
        device, total = self.position.device, len(self.position)
        cuts = np.unique(np.r_[self.prompt_start, self.row_start[self.inputs > 0], total])
        # Of a group whose completions have no token in the row, nobody asks for the prompt.
        asking = np.bincount(number, self.inputs).astype(np.int64)
        heads, asking = heads[asking > 0], asking[asking > 0]
        asked = self.prompt[heads]
        ends = [np.r_[0, np.cumsum(lengths)] for lengths in (asking, asked)]
        columns = [array.astype(np.int32) for array in (cuts, *ends)]
        of_itself, of_asking, of_asked = to_device(columns, device)
        longest = int(np.diff(cuts).max())
        itself = Sequences(of_itself, of_itself, longest, longest)
        shared = None
        if len(asking):
            shared = Sequences(of_asking, of_asked, int(asking.max()), int(asked.max()))
        completions, _ = ranges(self.row_start, self.inputs)
        prompts, _ = ranges(self.prompt_start[heads], asked)
        return RowParts(itself, shared, *to_device([completions, prompts], device))


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
