"""Base of a receiver: the weights in its host memory that deltas are applied to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.weights.arriving_weights import fingerprint
from paceline.weights.wire.weight_manifest import Manifest
from paceline.weights.wire.weight_share import WeightShare


@dataclass(frozen=True)
class ReceiverBase:
    """Weights that a receiver holds in host memory, for deltas to be applied to."""

    manifest: Manifest
    flat: Tensor
    """uint8[total_bytes]. Never written to."""
    checksums: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """Fingerprint of all bits."""
        return fingerprint(self.checksums)

    def fingerprint_of(self, share: WeightShare) -> str:
        """Fingerprint of the bits of the share."""
        return fingerprint([self.checksums[i] for i in share.buckets(self.manifest)])
