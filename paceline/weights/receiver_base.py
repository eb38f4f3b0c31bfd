"""Base of a receiver: the weights in its host memory that deltas are applied to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.weights.weight_manifest import Manifest


@dataclass(frozen=True)
class ReceiverBase:
    """Weights that a receiver holds in host memory, for deltas to be applied to."""

    manifest: Manifest
    flat: Tensor
    """uint8[total_bytes]. Never written to."""
    fingerprint: str
