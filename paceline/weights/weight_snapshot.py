"""Weight snapshots: copies of weights, or of a share, at one version, as they travel."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.weights.arriving_weights import WeightSource, fingerprint
from paceline.weights.bucket_delta import encode_deltas
from paceline.weights.tensor_checksum import checksums
from paceline.weights.weight_manifest import WHOLE_SHARE, Manifest, WeightShard

BUCKET_BYTES = 16 << 20
_AT_ONCE = {"cuda": 4}
"""Buckets that are summed up or compared at once, by device: each time the host waits for it. A
delta takes some 60 MiB meanwhile. On a CPU nobody waits, and the first bucket leaves sooner."""


@dataclass(frozen=True)
class WireDtype:
    """Type in which weights travel: that of the engine, which would convert them anyway."""

    dtype: torch.dtype | None = None
    """None: each tensor's own."""
    kept: Collection[str] = ()
    """Names of tensors that engines hold in the type they have."""

    def of(self, name: str, tensor: Tensor) -> torch.dtype:
        if self.dtype is None or name in self.kept or not tensor.is_floating_point():
            return tensor.dtype
        return self.dtype if tensor.element_size() > self.dtype.itemsize else tensor.dtype


class WeightSnapshot(WeightSource):
    """A copy of the weights at one version, or of a share of their buckets, in one flat buffer."""

    def __init__(
        self,
        version: int,
        manifest: Manifest,
        flat: Tensor,
        source: torch.device | None = None,
        share: WeightShard = WHOLE_SHARE,
    ) -> None:
        """``source``: the device whose current stream fills ``flat``; default: its own."""
        self.version = version
        self.publication = 0
        self.manifest = manifest
        self.share = share
        self.flat = flat
        self._ready: Any = None
        self._checksums: dict[int, str] = {}
        self._deltas: dict[int, Tensor | None] = {}
        self._base: WeightSnapshot | None = None
        self._lock = threading.Lock()
        if (source or flat.device).type == "cuda":
            self._ready = torch.cuda.Event()
            self._ready.record()

    @classmethod
    def take(
        cls,
        version: int,
        named: Iterable[tuple[str, Tensor]],
        pool: SnapshotPool | None = None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        wire: WireDtype = WireDtype(),
        on_host: bool = False,
    ) -> WeightSnapshot:
        """Copies the tensors (any layout, one device). With a ``pool`` the memory of snapshots that
        are no longer in use is used again. ``on_host``: the copy is in host memory, page-locked if
        the tensors are on a GPU."""
        tensors = [(name, tensor.detach()) for name, tensor in named]
        manifest = Manifest.of(tensors, bucket_bytes=bucket_bytes, dtype=wire.of)
        source = tensors[0][1].device if tensors else torch.device("cpu")

        def fill(flat: Tensor) -> None:
            views = manifest.views(flat).values()
            pairs = [
                (view, tensor)
                for view, (_, tensor), spec in zip(views, tensors, manifest.specs, strict=True)
                if tensor.numel() and not spec.same_as
            ]
            if pairs:
                targets, sources = map(list, zip(*pairs, strict=True))
                torch._foreach_copy_(targets, sources, non_blocking=True)

        return cls.filled(version, manifest, WHOLE_SHARE, source, fill, pool, on_host=on_host)

    @classmethod
    def filled(
        cls,
        version: int,
        manifest: Manifest,
        share: WeightShard,
        source: torch.device,
        fill: Callable[[Tensor], None],
        pool: SnapshotPool | None = None,
        *,
        on_host: bool = False,
    ) -> WeightSnapshot:
        """A snapshot of the share, whose buckets ``fill`` writes to uint8[share.size_bytes];
        padding stays zero. ``source``: the device whose current stream does it. ``pool``,
        ``on_host``: as for take()."""
        pool = pool or SnapshotPool(keep=0)
        device = torch.device("cpu") if on_host else source
        locked = on_host and source.type == "cuda"
        slot = pool.take(manifest, share, device, page_locked=locked)
        fill(slot[2])
        snapshot = cls(version, manifest, slot[2], source, share)
        weakref.finalize(snapshot, pool.give_back, slot).atexit = False
        return snapshot

    def wait_ready(self) -> None:
        if self._ready is not None:
            self._ready.synchronize()

    def bucket(self, index: int) -> Tensor:
        return self.share.bucket(self.manifest, self.flat, index)

    def checksum(self, index: int) -> str:
        """Checksum of one bucket; computed once, however many links the snapshot goes over."""
        if index not in self._checksums:
            near = self._next(index, self._checksums)
            found = checksums([self.bucket(i) for i in near])
            self._checksums.update(zip(near, found, strict=True))
        return self._checksums[index]

    def _next(self, index: int, done: Collection[int]) -> list[int]:
        """Bucket ``index`` and those after it that are computed with it."""
        share = self.share.buckets(self.manifest)
        rest = (i for i in share[share.index(index) :] if i not in done)
        return list(itertools.islice(rest, _AT_ONCE.get(self.flat.device.type, 1)))

    @property
    def fingerprint(self) -> str:
        """Fingerprint of all bits of the share, as both ends of a link compute it."""
        return fingerprint([self.checksum(i) for i in self.share.buckets(self.manifest)])

    def follow(self, base: WeightSnapshot | None) -> None:
        """Lets buckets travel as what changed since ``base``, if that has the same tensors."""
        if base is None or (base.manifest, base.share) != (self.manifest, self.share):
            return
        if self.manifest.may_be_sparse:
            self._base = base

    def forget_base(self) -> None:
        """Frees the snapshot before this one, as soon as no transfer uses it."""
        with self._lock:
            self._base = None
            self._deltas.clear()

    @property
    def base(self) -> WeightSnapshot | None:
        return self._base

    def base_for(self, held: str) -> WeightSnapshot | None:
        """The snapshot before this one, if it is what the receiver holds."""
        base = self._base
        return base if base is not None and held and base.fingerprint == held else None

    def delta(self, index: int, base: WeightSnapshot) -> Tensor | None:
        """One bucket as what changed since ``base``, on the host; None if it travels whole.
        ``base``: as ``self.base`` was when the transfer began. Computed once, however many links it
        goes over."""
        with self._lock:
            if index not in self._deltas:
                near = self._next(index, self._deltas)
                deltas = encode_deltas([(base.bucket(i), self.bucket(i)) for i in near])
                self._deltas.update(zip(near, deltas, strict=True))
            return self._deltas[index]


_Slot = tuple[Manifest, WeightShard, Tensor]
"""A buffer, and what it is for."""


class SnapshotPool:
    """Buffers of snapshots that are no longer in use; fresh memory costs more than the copy."""

    def __init__(self, keep: int = 2) -> None:
        self._keep = keep
        self._free: list[_Slot] = []
        self._lock = threading.Lock()

    def take(
        self,
        manifest: Manifest,
        share: WeightShard,
        device: torch.device,
        *,
        page_locked: bool = False,
    ) -> _Slot:
        with self._lock:
            for i, slot in enumerate(self._free):
                if slot[:2] == (manifest, share) and slot[2].device == device:
                    return self._free.pop(i)
        # Zeroed: padding between tensors is part of the buckets' checksums.
        flat = torch.zeros(
            share.size_bytes(manifest), dtype=torch.uint8, device=device, pin_memory=page_locked
        )
        return manifest, share, flat

    def give_back(self, slot: _Slot) -> None:
        with self._lock:
            self._free = [slot, *self._free][: self._keep]
