"""Arriving weights: those of one version in host memory, bucket by bucket as they come over a link.

    link thread ── add(bucket) ──► ArrivingWeights ──► senders to other receivers, each at its own bucket

Invariants:

- A bucket counts as held once it matched its checksum. From then on it never changes.
- Checksums are the trainer's. They are handed on as they came and never computed anew, so what a relay's memory
  damages later is noticed by the next receiver.
- They outlive the link that they came over: the next one goes on at the first missing bucket.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.weights.weight_manifest import Manifest


class GivenUp(Exception):
    """The rest of these weights will never come: others have taken their place."""


@dataclass(frozen=True)
class Begun:
    """What a receiver holds of a version that has not come to its end."""

    version: int
    buckets: int
    fingerprint: str
    """Of the checksums of these buckets."""


class WeightSource(Protocol):
    """Weights of one version that can be sent: a trainer's snapshot, or what a relay has received."""

    version: int
    manifest: Manifest
    flat: Tensor

    def wait_ready(self) -> None:
        """Blocks until a copy that a device makes in the background is complete."""

    def wait_bucket(self, index: int, timeout_s: float) -> bool:
        """Whether the bucket is here, after a wait of at most ``timeout_s``. Raises GivenUp."""

    def bucket(self, index: int) -> Tensor: ...

    def checksum(self, index: int) -> str: ...

    def base_for(self, held: str) -> Any:
        """What ``delta`` takes, for a receiver that holds the base with fingerprint ``held``; None: it gets whole
        buckets."""

    def delta(self, index: int, base: Any) -> Tensor | None:
        """The bucket as encode_delta() of that of the base, on the host; None: it travels whole."""


class ArrivingWeights:
    """A WeightSource that fills up. One thread adds buckets; any number of others read them."""

    def __init__(
        self, version: int, manifest: Manifest, *, tree: int = 0, keep_deltas: bool = False
    ) -> None:
        """``tree``: of the link that they come over. ``keep_deltas``: for receivers that have the same base."""
        self.version = version
        self.manifest = manifest
        self.flat = torch.empty(manifest.total_bytes, dtype=torch.uint8)
        self.tree = tree
        self.base = ""
        """Fingerprint of the base of the deltas that came; empty if none did."""
        self._keep_deltas = keep_deltas
        self._checksums: list[str] = []
        self._deltas: dict[int, Tensor] = {}
        self._given_up = False
        self._moved = threading.Condition()

    # ---- the receiving thread

    def add(self, checksum: str, delta: Tensor | None) -> None:
        """The next bucket is in ``flat``, intact. ``delta``: as it came; None: it came whole."""
        with self._moved:
            if delta is not None and self._keep_deltas:
                self._deltas[self.held] = delta
            self._checksums.append(checksum)
            self._moved.notify_all()

    def leave_memory(self) -> None:
        """Moves to other memory, because something may still write to a missing bucket of the present one."""
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
        """Number of buckets that are here; they are the first ones."""
        return len(self._checksums)

    @property
    def complete(self) -> bool:
        return self.held == self.manifest.buckets

    @property
    def begun(self) -> Begun:
        with self._moved:
            return Begun(self.version, self.held, fingerprint(self._checksums))

    @property
    def fingerprint(self) -> str:
        """Of all bits, once they are complete."""
        return fingerprint(self._checksums)

    def wake(self) -> None:
        """Ends the present waits for buckets early."""
        with self._moved:
            self._moved.notify_all()

    # ---- WeightSource

    def wait_ready(self) -> None:
        return None

    def wait_bucket(self, index: int, timeout_s: float) -> bool:
        with self._moved:
            if index >= self.held and not self._given_up:
                self._moved.wait(timeout_s)
            if index < self.held:
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
    """Of weights whose buckets have these checksums."""
    return hashlib.blake2b("".join(checksums).encode(), digest_size=16).hexdigest()
