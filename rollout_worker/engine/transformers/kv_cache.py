"""Key-value cache in slots: one row a sequence, position i of a sequence at index i of its row.

Rows 0 .. n-1 are in use, so that attention reads slices and finished rows cost nothing. Memory
grows by doubling, up to a budget.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_LENGTH_STEP = 32
_ROWS_STEP = 16


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Shape of a token's keys and values, the same in every layer."""

    layers: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        per_head = (self.key_dim + self.value_dim) * self.dtype.itemsize
        return int(self.layers * self.heads * per_head)


class SlotCache:
    """``keys`` and ``values``: [layers, rows, heads, length, dim]."""

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self.keys = self._empty(0, 0, shape.key_dim)
        self.values = self._empty(0, 0, shape.value_dim)

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
        if length > self.length:
            # Doubling keeps the copying linear in the final length.
            length = _round_up(max(length, min(2 * self.length, 2 * length)), _LENGTH_STEP)
        else:
            length = self.length
        keys, values = self.keys, self.values
        self.keys = self._empty(rows, length, self.shape.key_dim)
        self.values = self._empty(rows, length, self.shape.value_dim)
        if used_rows:
            span = (slice(None), slice(used_rows), slice(None), slice(used_length))
            self.keys[span] = keys[span]
            self.values[span] = values[span]

    def fill(self, rows: Tensor, sources: Tensor, keys: Tensor, values: Tensor) -> None:
        """Copies sequence ``sources[i]`` of a prefill into row ``rows[i]``.

        ``keys``, ``values``: [layers, sequences, heads, tokens, dim]. One prefill may fill many
        rows.
        """
        tokens = keys.shape[3]
        self.keys[:, rows, :, :tokens] = keys.index_select(1, sources)
        self.values[:, rows, :, :tokens] = values.index_select(1, sources)

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """Copies the first ``length`` positions of rows ``sources`` over rows ``targets``."""
        self.keys[:, targets, :, :length] = self.keys[:, sources, :, :length]
        self.values[:, targets, :, :length] = self.values[:, sources, :, :length]

    def clear(self, rows: Tensor) -> None:
        """Zeroes rows."""
        self.keys[:, rows] = 0
        self.values[:, rows] = 0

    def token_index(self, positions: Tensor) -> Tensor:
        """Where position ``positions[i]`` of row i lies in a layer flattened to [-1, dim].

        int64 [rows * heads], heads fastest.
        """
        heads = self.shape.heads
        base = torch.arange(len(positions) * heads, device=positions.device) * self.length
        return base + positions.repeat_interleave(heads)

    def _empty(self, rows: int, length: int, dim: int) -> Tensor:
        # Zeroed: positions that were never written are masked, but 0 * NaN would still be NaN.
        size = (self.shape.layers, rows, self.shape.heads, length, dim)
        return torch.zeros(size, dtype=self.shape.dtype, device=self.shape.device)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
