"""Columns of tokens: everything the loss reads of each completion token, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from policy_worker.step.packing import MicroBatch

Array = TypeVar("Array", np.ndarray, Tensor)

FLOATS = ("behaviour", "advantage", "weight", "trained", "staleness")


@dataclass(frozen=True, slots=True)
class TokenColumns(Generic[Array]):
    """C completion tokens of S sequences: NumPy arrays of a whole batch, or tensors of a micro-batch.

    All are [C], float32 except ``sequence_of``, which is int64.
    """

    behaviour: Array
    """Log-prob as sampled."""
    advantage: Array
    """Of the token's sequence."""
    weight: Array
    """Its share in the step's loss, see token_weights."""
    trained: Array
    """1 or 0."""
    staleness: Array
    """In steps."""
    sequence_of: Array
    """The token's sequence, from 0 to sequences - 1."""
    sequences: int
    reference: Tensor | None = None
    """Log-prob under the reference model."""

    def of(
        self, micro: MicroBatch, device: torch.device, reference: Tensor | None
    ) -> TokenColumns[Tensor]:
        """The tokens of one micro-batch of this batch, on ``device``."""
        floats = {name: getattr(self, name)[micro.token_index] for name in FLOATS}
        # Stacked: one copy to the device instead of five.
        stacked = torch.from_numpy(np.stack(list(floats.values()))).to(device)
        return TokenColumns(
            **dict(zip(floats, stacked, strict=True)),
            sequence_of=micro.sequence_of,
            sequences=len(micro.sequence_index),
            reference=reference,
        )
