"""Share of a set of weights: the buckets that one of its sources holds and sends.

The ranks of a replica are the sources of what it publishes: of n sources, source k has every n-th
bucket, from bucket k on. A replica of one rank, and a relay, are the only source and have them all.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.weights.wire.weight_manifest import Manifest


@dataclass(frozen=True, slots=True)
class WeightShare:
    source: int = 0
    sources: int = 1

    def buckets(self, manifest: Manifest) -> range:
        """Indices of its buckets, in rising order."""
        return range(self.source, manifest.buckets, self.sources)

    def size_bytes(self, manifest: Manifest) -> int:
        mine = self.buckets(manifest)
        if not mine:
            return 0
        last = min(manifest.total_bytes, (mine[-1] + 1) * manifest.bucket_bytes)
        return (len(mine) - 1) * manifest.bucket_bytes + last - mine[-1] * manifest.bucket_bytes

    def place(self, manifest: Manifest, index: int) -> int:
        """Offset of bucket ``index`` in a buffer with the share's buckets one after the other."""
        return index // self.sources * manifest.bucket_bytes

    def bucket(self, manifest: Manifest, flat: Tensor, index: int) -> Tensor:
        """The bucket inside uint8[size_bytes] ``flat``: a view."""
        if index not in self.buckets(manifest):
            raise IndexError(f"source {self.source} of {self.sources} does not hold bucket {index}")
        start = self.place(manifest, index)
        return flat[start : start + manifest.bucket_bytes]


WHOLE_SHARE = WeightShare()
