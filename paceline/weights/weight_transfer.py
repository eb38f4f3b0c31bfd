"""Weight transfer from the trainer to an engine: snapshot, transfer, staging.

One transfer over a link, publisher (rank 0) to receiver (rank 1):

    receiver → hello {version it has}                        once, when the link is formed
    publisher → header {version, manifest} → buckets → trailer {a checksum for each bucket}
    receiver → ack {version}

Invariants:

- A snapshot never changes: what is sent is the state at one version, whatever the trainer does.
- Staged weights are complete and intact, or the transfer raises and there are none.
- No size from a message is used before it was checked.
"""

from __future__ import annotations

import json
import os
import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from paceline.mesh.elastic_mesh import ProcessMesh
from paceline.weights.tensor_checksum import checksum, weights_digest
from paceline.weights.weight_manifest import Manifest, WeightsRefused

PUBLISHER, RECEIVER = 0, 1
BUCKET_BYTES = 16 << 20

_PROTOCOL = 1
_SMALL_FRAME = 64 << 10
_HEADER_FRAME = 128 << 20


class WeightSnapshot:
    """A copy of all weights at one version, in one flat buffer on the weights' device."""

    def __init__(self, version: int, manifest: Manifest, flat: Tensor) -> None:
        self.version = version
        self.manifest = manifest
        self.flat = flat
        self._ready: Any = None
        self._checksums: dict[int, str] = {}
        if flat.device.type == "cuda":
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
    ) -> WeightSnapshot:
        """Copies the tensors (any layout, one device), once.

        With a ``pool`` the memory of snapshots that are no longer in use is used again.
        """
        tensors = [(name, tensor.detach()) for name, tensor in named]
        manifest = Manifest.of(tensors, bucket_bytes=bucket_bytes)
        device = tensors[0][1].device if tensors else torch.device("cpu")
        slot = (pool or SnapshotPool()).take(manifest, device)
        targets, sources = [], []
        for spec, (name, tensor) in zip(manifest.specs, tensors, strict=True):
            if not spec.same_as and tensor.numel():
                targets.append(slot.views[name])
                sources.append(tensor)
        if targets:
            torch._foreach_copy_(targets, sources)
        snapshot = cls(version, manifest, slot.flat)
        if pool is not None:
            weakref.finalize(snapshot, pool.give_back, slot).atexit = False
        return snapshot

    def wait_ready(self) -> None:
        """Blocks until a copy that a device makes in the background is complete."""
        if self._ready is not None:
            self._ready.synchronize()

    def bucket(self, index: int) -> Tensor:
        return self.manifest.bucket(self.flat, index)

    def checksum(self, index: int) -> str:
        """Of one bucket; computed once, however many links the snapshot goes over."""
        if index not in self._checksums:
            self._checksums[index] = checksum(self.bucket(index))
        return self._checksums[index]


@dataclass(frozen=True)
class _Slot:
    manifest: Manifest
    flat: Tensor
    views: dict[str, Tensor]


class SnapshotPool:
    """Buffers of snapshots that are no longer in use; fresh memory costs more than the copy."""

    def __init__(self, keep: int = 2) -> None:
        self._keep = keep
        self._free: list[_Slot] = []
        self._lock = threading.Lock()

    def take(self, manifest: Manifest, device: torch.device) -> _Slot:
        with self._lock:
            for i, slot in enumerate(self._free):
                if slot.manifest == manifest and slot.flat.device == device:
                    return self._free.pop(i)
        # Zeroed: padding between tensors is part of the buckets' checksums.
        flat = torch.zeros(manifest.total_bytes, dtype=torch.uint8, device=device)
        return _Slot(manifest, flat, manifest.views(flat))

    def give_back(self, slot: _Slot) -> None:
        with self._lock:
            self._free = [slot, *self._free][: self._keep]


@dataclass(frozen=True)
class StagedWeights:
    """Weights of one version as received. ``tensors``: by name, on the receiver's device; views of
    one buffer that belongs to whoever holds them."""

    version: int
    tensors: dict[str, Tensor]
    seconds: float = 0.0
    """From the announcement of the transfer to intact in memory."""

    @cached_property
    def digest(self) -> str:
        """weights_digest() of the tensors; computed when first asked for."""
        return weights_digest(self.tensors.items())


def say_hello(mesh: ProcessMesh, version: int) -> None:
    """Receiver: sends the version that it already has; -1 for none."""
    _send_frame(mesh, {"protocol": _PROTOCOL, "version": version}, PUBLISHER)


def await_hello(mesh: ProcessMesh) -> int:
    """Publisher: the version that the receiver has."""
    hello = _recv_frame(mesh, RECEIVER, _SMALL_FRAME)
    if hello.get("protocol") != _PROTOCOL:
        raise WeightsRefused(f"the receiver speaks protocol {hello.get('protocol')!r}")
    return _version(hello)


def send_snapshot(mesh: ProcessMesh, snapshot: WeightSnapshot) -> None:
    """Publisher: sends all buckets and waits for the receiver's acknowledgement.

    Raises EpochCancelled, MeshError, or WeightsRefused if the reply makes no sense.
    """
    snapshot.wait_ready()
    manifest = snapshot.manifest
    direct = mesh.joins_devices and snapshot.flat.device == mesh.device
    header = {"version": snapshot.version, "direct": direct, "manifest": manifest.to_json()}
    _send_frame(mesh, header, RECEIVER)
    checksums = []
    for i in range(manifest.buckets):
        bucket = snapshot.bucket(i)
        sending = mesh.send_async(bucket if direct else bucket.cpu(), RECEIVER)
        checksums.append(snapshot.checksum(i))
        mesh.wait(sending)
    _send_frame(mesh, {"checksums": checksums}, RECEIVER)
    ack = _recv_frame(mesh, RECEIVER, _SMALL_FRAME)
    if _version(ack) != snapshot.version:
        raise WeightsRefused(f"version {snapshot.version} was sent, {_version(ack)} acknowledged")


def receive_snapshot(
    mesh: ProcessMesh, *, newer_than: int = -1, limit_bytes: int | None = None
) -> StagedWeights:
    """Receiver: waits for the next version and stages it in fresh memory.

    ``newer_than``: any version up to this is refused. ``limit_bytes``: largest buffer to allocate;
    default: the device's whole memory. Call acknowledge() once the engine holds it.

    Raises EpochCancelled, MeshError, or WeightsRefused: old version, malformed, too large, or a
    bucket that does not match its checksum.
    """
    header = _recv_frame(mesh, PUBLISHER, _HEADER_FRAME)
    started = time.perf_counter()
    version = _version(header)
    if version <= newer_than:
        raise WeightsRefused(f"version {version} was offered, {newer_than} is here already")
    manifest = Manifest.from_json(
        header.get("manifest"), limit_bytes=limit_bytes or _memory_bytes(mesh.device)
    )
    direct = header.get("direct") is True
    if direct and not mesh.joins_devices:
        raise WeightsRefused("buckets were announced over a device link that is not there")
    device = mesh.device if direct else torch.device("cpu")
    flat = torch.empty(manifest.total_bytes, dtype=torch.uint8, device=device)
    sums: list[str] = []
    for i in range(manifest.buckets):
        # The checksum of one bucket is computed while the next one arrives.
        receiving = mesh.recv_async(manifest.bucket(flat, i), PUBLISHER)
        if i:
            sums.append(checksum(manifest.bucket(flat, i - 1)))
        mesh.wait(receiving)
    if manifest.buckets:
        sums.append(checksum(manifest.bucket(flat, manifest.buckets - 1)))
    trailer = _recv_frame(mesh, PUBLISHER, _SMALL_FRAME + 64 * manifest.buckets)
    expected = trailer.get("checksums")
    if not isinstance(expected, list) or len(expected) != len(sums):
        raise WeightsRefused("the checksums do not fit the buckets")
    for i, (found, wanted) in enumerate(zip(sums, expected, strict=True)):
        if found != wanted:
            raise WeightsRefused(f"bucket {i} of version {version} was damaged on the way")
    tensors = manifest.views(flat.to(mesh.device))
    return StagedWeights(version, tensors, time.perf_counter() - started)


def acknowledge(mesh: ProcessMesh, version: int) -> None:
    """Receiver: version is staged, and the next one may be sent."""
    _send_frame(mesh, {"version": version}, PUBLISHER)


def _send_frame(mesh: ProcessMesh, value: dict[str, Any], peer: int) -> None:
    raw = bytearray(json.dumps(value, separators=(",", ":")).encode())
    mesh.send(torch.tensor([len(raw)], dtype=torch.int64), peer)
    mesh.send(torch.frombuffer(raw, dtype=torch.uint8), peer)


def _recv_frame(mesh: ProcessMesh, peer: int, limit: int) -> dict[str, Any]:
    length = torch.zeros(1, dtype=torch.int64)
    mesh.recv(length, peer)
    size = int(length.item())
    if not 0 < size <= limit:
        raise WeightsRefused(f"a message of {size} bytes exceeds the limit of {limit}")
    raw = torch.empty(size, dtype=torch.uint8)
    mesh.recv(raw, peer)
    try:
        value = json.loads(raw.numpy().tobytes())
    except ValueError as error:
        raise WeightsRefused("a message is not JSON") from error
    if not isinstance(value, dict):
        raise WeightsRefused("a message is not a JSON object")
    return value


def _version(message: dict[str, Any]) -> int:
    version = message.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or not -1 <= version < 1 << 62:
        raise WeightsRefused(f"{version!r} is no version")
    return version


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
