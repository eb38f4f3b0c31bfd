"""The decoder interface: one forward for new prompts, one for the next token of every row. And the
cache between them, with a slot for each row."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_LENGTH_STEP = 32
_ROWS_STEP = 16


@dataclass(frozen=True, slots=True)
class CacheShape:
    layers: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    states: tuple[tuple[torch.Size, torch.dtype], ...] = ()
    """Shape and type of what recurrent layers keep of a sequence, whatever its length."""

    @property
    def bytes_per_token(self) -> int:
        per_head = (self.key_dim + self.value_dim) * self.dtype.itemsize
        return int(self.layers * self.heads * per_head)

    @property
    def bytes_per_row(self) -> int:
        """Bytes of a sequence beside its tokens'."""
        return sum(math.prod(size) * dtype.itemsize for size, dtype in self.states)


class SlotCache:
    """``keys`` and ``values``: [layers, rows, heads, length, dim]. ``states``: [rows, ...] each."""

    def __init__(self, shape: CacheShape, longest: int = 0) -> None:
        """``longest``: most tokens of a sequence; 0: unknown."""
        self.shape = shape
        self.longest = longest
        self.moves = 0
        """How often the entries were copied to other memory."""
        self.keys = self._empty(0, 0, shape.key_dim)
        self.values = self._empty(0, 0, shape.value_dim)
        self.states = self._no_states(0)

    @property
    def rows(self) -> int:
        return int(self.keys.shape[1])

    @property
    def length(self) -> int:
        return int(self.keys.shape[3])

    def reserve(self, rows: int, length: int, used_rows: int, used_length: int) -> None:
        """Makes room for ``rows`` sequences of ``length`` tokens; used entries are kept."""
        if rows <= self.rows and length <= self.length:
            return
        rows = self.rows if rows <= self.rows else _round_up(rows, _ROWS_STEP)
        # Doubling keeps the copying linear in the final length.
        doubled = min(2 * self.length, 2 * length, self.longest or 2 * length)
        longer = _round_up(max(length, doubled), _LENGTH_STEP)
        length = self.length if length <= self.length else longer
        self.moves += 1
        keys, values = self.keys, self.values
        self.keys = self._empty(rows, length, self.shape.key_dim)
        self.values = self._empty(rows, length, self.shape.value_dim)
        if used_rows:
            span = (slice(None), slice(used_rows), slice(None), slice(used_length))
            self.keys[span] = keys[span]
            self.values[span] = values[span]
        states, self.states = self.states, self._no_states(rows)
        for state, before in zip(self.states, states, strict=True):
            state[:used_rows] = before[:used_rows]

    def fill(self, rows: slice, sources: Tensor, prefilled: "Prefilled") -> None:
        """Copies sequence ``sources[i]`` of a prefill into the i-th of ``rows``. One prefill may
        fill many rows."""
        tokens = prefilled.keys.shape[3]
        self.keys[:, rows, :, :tokens] = prefilled.keys.index_select(1, sources)
        self.values[:, rows, :, :tokens] = prefilled.values.index_select(1, sources)
        for state, new in zip(self.states, prefilled.states, strict=True):
            state[rows] = new.index_select(0, sources)

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copies the first ``length`` positions of rows ``sources`` over rows ``targets``."""
        self.keys[:, targets, :, :length] = self.keys[:, sources, :, :length]
        self.values[:, targets, :, :length] = self.values[:, sources, :, :length]
        for state in self.states:
            state[targets] = state[sources]

    def clear(self, rows: Tensor) -> None:
        self.keys[:, rows] = 0
        self.values[:, rows] = 0
        for state in self.states:
            state[rows] = 0

    def token_index(self, positions: Tensor) -> Tensor:
        """Index of position ``positions[i]`` of row i in a layer flattened to [-1, dim]. int64
        [rows * heads], heads fastest."""
        heads = self.shape.heads
        base = torch.arange(len(positions) * heads, device=positions.device) * self.length
        return base + positions.repeat_interleave(heads)

    def _empty(self, rows: int, length: int, dim: int) -> Tensor:
        # Zeroed: positions that were never written are masked, but 0 * NaN would still be NaN.
        size = (self.shape.layers, rows, self.shape.heads, length, dim)
        return torch.zeros(size, dtype=self.shape.dtype, device=self.shape.device)

    def _no_states(self, rows: int) -> list[Tensor]:
        device = self.shape.device
        states = self.shape.states
        return [torch.zeros((rows, *size), dtype=dtype, device=device) for size, dtype in states]


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


@dataclass(frozen=True, slots=True)
class Prefilled:
    """``logits`` float32 [sequences, vocabulary] after each sequence's last token; ``keys`` and
    ``values`` [layers, sequences, heads, tokens, dim], meaningless beyond a sequence's length;
    ``states`` [sequences, ...] each, after the last token."""

    logits: Tensor
    keys: Tensor
    values: Tensor
    states: tuple[Tensor, ...] = ()
    routes: Tensor | None = None
    """int64 [sequences, tokens, W]: experts of each token, if they are noted."""


class Decoder(Protocol):
    routes: Tensor | None
    """int64 [n, W]: experts of the tokens that were decoded last, if they are noted."""

    @property
    def shape(self) -> CacheShape: ...

    def prefill(self, tokens: Tensor, lengths: Tensor) -> Prefilled:
        """``tokens`` int64 [sequences, longest], padded on the right; ``lengths`` int64
        [sequences]."""

    def decode(self, cache: SlotCache, tokens: Tensor, positions: Tensor, length: int) -> Tensor:
        """Feeds one token to each of rows 0 .. n-1 and stores its keys and values. ``tokens``,
        ``positions`` int64 [n]; ``length``: 1 + the largest position. Returns logits float32 [n,
        vocabulary]."""

    def refresh(self) -> None:
        """The model's weights have changed in place. What a decode step reads beside the cache has
        to stay where it is: a captured one looks for it there."""

    def reach(self, length: int) -> None:
        """Prepares for sequences of ``length`` tokens, so that no step of one moves memory."""


def largest_gap(decoder: Decoder, model: torch.nn.Module, vocabulary: int) -> float:
    """Largest difference between the decoder's log-probs and those of the model's own plain
    forward. Over two sequences of unequal length, one of them decoded token by token at the end. It
    is checked at every start: no test can cover all architectures and settings."""
    device = decoder.shape.device
    lengths = torch.tensor([7, 4], device=device)
    steps = 2
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, vocabulary, (2, 7 + steps), generator=generator).to(device)
    with torch.inference_mode():
        prefilled = decoder.prefill(tokens[:, :7], lengths)
        cache = SlotCache(decoder.shape)
        cache.reserve(2, 7 + steps, 0, 0)
        rows = torch.arange(2, device=device)
        cache.fill(slice(2), rows, prefilled)
        mine = [prefilled.logits]
        for step in range(steps):
            positions = lengths + step
            fed = tokens[rows, positions]
            mine.append(decoder.decode(cache, fed, positions, 8 + step))
        # What follows the shorter one changes nothing before it.
        plain = model(input_ids=tokens, use_cache=False).logits
        gap = 0.0
        for row, n in enumerate(lengths.tolist()):
            expected = torch.log_softmax(plain[row, n - 1 : n + steps].float(), -1)
            got = torch.log_softmax(torch.stack([logits[row] for logits in mine]), -1)
            gap = max(gap, (got - expected).abs().max().item())
    return gap
