"""Arriving weights: those of one version in host memory, bucket by bucket as they come over a link.

    link threads ── add(bucket) ──► ArrivingWeights ──► senders, each at its own bucket

Invariants:

- A bucket counts as held once it matched its checksum. From then on it never changes.
- Checksums are the trainer's. They are handed on as they came and never computed anew, so what a
  relay's memory damages later is noticed by the next receiver.
- They outlive the link that they came over: the next one brings what is missing, and once they are
  complete they are a base for deltas.
"""

import hashlib
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.weights.weight_manifest import WHOLE_SHARE, Manifest, WeightShard


class GivenUp(Exception):
    """The rest of these weights will never come: others have taken their place."""


class WeightSource(Protocol):
    """Weights of one version that can be sent: a trainer's snapshot, or a relay's reception."""

    version: int
    publication: int
    """Counts what a trainer published, equally on all ranks of its replica: a version that was
    taken back may come again, with other bits."""
    manifest: Manifest
    share: WeightShard
    flat: Tensor

    def wait_ready(self) -> None:
        """Blocks until a copy that a device makes in the background is complete."""
        return

    def wait_bucket(self, index: int, timeout_s: float) -> bool:
        """Waits at most ``timeout_s``; True if the bucket is here then. Raises GivenUp."""
        return True

    def bucket(self, index: int) -> Tensor: ...

    def checksum(self, index: int) -> str: ...

    def base_for(self, held: str) -> Any:
        """Base to name to ``delta`` for a receiver whose base has the fingerprint ``held`` over the
        share; None if it gets whole buckets."""

    def delta(self, index: int, base: Any) -> Tensor | None:
        """The bucket's changes since the base's, on the host; None: it travels whole."""


class ArrivingWeights(WeightSource):
    """A WeightSource that fills up: one thread a source adds buckets, any others read them."""

    publication = 0
    share = WHOLE_SHARE

    tree = 0
    """The tree of the link that they come over."""

    def __init__(self, version: int, manifest: Manifest, *, keep_deltas: bool = False) -> None:
        """``keep_deltas``: for receivers that have the same base."""
        self.version = version
        self.manifest = manifest
        self.flat = torch.empty(manifest.total_bytes, dtype=torch.uint8)
        self.base = ""
        """Fingerprint of the base of the deltas that came; empty if none did."""
        self._keep_deltas = keep_deltas
        self._checksums: dict[int, str] = {}
        self._deltas: dict[int, Tensor] = {}
        self._given_up = False
        self._wakes = 0
        self._moved = threading.Condition()

    # ---- the receiving threads

    def add(self, index: int, checksum: str, delta: Tensor | None) -> None:
        """This bucket is in ``flat``, intact. ``delta``: as it came; None: it came whole."""
        with self._moved:
            if delta is not None and self._keep_deltas:
                self._deltas[index] = delta
            self._checksums[index] = checksum
            self._moved.notify_all()

    def leave_memory(self) -> None:
        """Moves to other memory: a missing bucket of the present one may still be written."""
        with self._moved:
            self.flat = self.flat.clone()

    def give_up(self) -> None:
        """No bucket will be added any more."""
        with self._moved:
            self._given_up = not self.complete
            self._moved.notify_all()

    # ---- any thread

    @property
    def held(self) -> int:
        """Number of buckets that are here."""
        return len(self._checksums)

    @property
    def complete(self) -> bool:
        return self.held == self.manifest.buckets

    def held_of(self, share: WeightShard) -> tuple[list[int], str]:
        """The buckets of the share that are here, and the fingerprint of their checksums."""
        with self._moved:
            here = [i for i in share.buckets(self.manifest) if i in self._checksums]
            return here, fingerprint([self._checksums[i] for i in here])

    def fingerprint_of(self, share: WeightShard = WHOLE_SHARE) -> str:
        """Fingerprint of the bits of the share that are here."""
        return self.held_of(share)[1]

    def wake(self) -> None:
        """Ends the present waits for buckets early."""
        with self._moved:
            self._wakes += 1
            self._moved.notify_all()

    # ---- WeightSource

    def wait_bucket(self, index: int, timeout_s: float) -> bool:
        with self._moved:
            wakes = self._wakes
            self._moved.wait_for(
                lambda: index in self._checksums or self._given_up or self._wakes != wakes,
                timeout_s,
            )
            if index in self._checksums:
                return True
            if self._given_up:
                raise GivenUp(f"version {self.version} will not be complete")
            return False

    def bucket(self, index: int) -> Tensor:
        return self.manifest.bucket(self.flat, index)

    def checksum(self, index: int) -> str:
        return self._checksums[index]

    def base_for(self, held: str) -> str | None:
        return held if held and held == self.base else None

    def delta(self, index: int, base: str) -> Tensor | None:
        return self._deltas.get(index)


def fingerprint(checksums: Sequence[str]) -> str:
    """Fingerprint of weights whose buckets have these checksums."""
    return hashlib.blake2b("".join(checksums).encode(), digest_size=16).hexdigest()
