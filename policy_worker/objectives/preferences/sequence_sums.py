"""Sums over the sequences of a row, whose tokens follow one another."""

from __future__ import annotations

from torch import Tensor


def sequence_mean(values: Tensor, mask: Tensor, sequence_of: Tensor, sequences: int) -> Tensor:
    """values [C], mask [C] (1 or 0) -> [C]: at each token, the mean over the masked-in tokens of
    its sequence. Differentiable."""
    zeros = values.new_zeros(sequences)
    total = zeros.index_add(0, sequence_of, values * mask)
    count = zeros.index_add(0, sequence_of, mask).clamp(min=1.0)
    return (total / count)[sequence_of]


def sum_to_end(values: Tensor, sequence_of: Tensor, sequences: int) -> Tensor:
    """values [C] -> [C]: at each token, the sum from it to the end of its sequence."""
    # float64: a difference of two sums over the whole row.
    wide = values.double()
    total = wide.new_zeros(sequences).index_add(0, sequence_of, wide)
    ended = total.cumsum(0)[sequence_of]
    result: Tensor = ended - wide.cumsum(0) + wide
    return result.to(values.dtype)
