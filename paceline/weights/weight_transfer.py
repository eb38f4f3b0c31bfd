"""Weight transfer from the trainer to an engine: snapshot, transfer, staging.

One transfer over a link, publisher (rank 0) to receiver (rank 1):

    receiver → hello {version it has, fingerprint of the base it holds}     once, when the link is formed
    publisher → header {version, manifest, base} → buckets → trailer {a checksum for each bucket}
    receiver → ack {version}

If both ends hold the same base, the weights of an earlier version, each bucket follows a size: that of
its delta, or 0 before a whole bucket (see bucket_delta).

Invariants:

- A snapshot never changes: what is sent is the state at one version, whatever the trainer does.
- Staged weights are complete and intact, or the transfer raises and there are none. Checksums are those
  of whole buckets, however they travelled.
- No size from a message is used before it was checked.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from paceline.mesh.elastic_mesh import ProcessMesh
from paceline.weights.bucket_delta import WORTH, apply_delta
from paceline.weights.frames import recv_frame, recv_size, send_frame, send_size
from paceline.weights.tensor_checksum import checksum, weights_digest
from paceline.weights.weight_manifest import Manifest, WeightsRefused
from paceline.weights.weight_snapshot import WeightSnapshot, fingerprint

PUBLISHER, RECEIVER = 0, 1

_PROTOCOL = 2
_SMALL_FRAME = 64 << 10
_HEADER_FRAME = 128 << 20


@dataclass(frozen=True)
class ReceiverBase:
    """Weights that a receiver holds in host memory, for deltas to be applied to."""

    manifest: Manifest
    flat: Tensor
    """uint8[total_bytes]. Never written to."""
    fingerprint: str


@dataclass(frozen=True)
class Hello:
    """State of the receiver when the link is formed."""

    version: int
    """-1 for none."""
    base: str = ""
    """Fingerprint of the base that it holds; empty for none."""


@dataclass(frozen=True)
class Sent:
    """A finished transfer, as the publisher sees it."""

    version: int
    fingerprint: str
    wire_bytes: int
    """Of the buckets, whole or as deltas."""


@dataclass(frozen=True)
class StagedWeights:
    """Weights of one version as received. ``tensors``: by name, on the receiver's device; not to be
    written to."""

    version: int
    tensors: dict[str, Tensor]
    seconds: float = 0.0
    """From the announcement of the transfer to intact in memory."""
    base: ReceiverBase | None = None
    """The same weights as a base for the next version; None if they came straight to a device, or if deltas of
    their types are not worth it."""

    @cached_property
    def digest(self) -> str:
        """weights_digest() of the tensors; computed when first asked for."""
        return weights_digest(self.tensors.items())


def say_hello(mesh: ProcessMesh, version: int, base: ReceiverBase | None = None) -> None:
    """Receiver: sends the version that it already has, -1 for none, and the base that it holds."""
    held = "" if base is None else base.fingerprint
    send_frame(mesh, {"protocol": _PROTOCOL, "version": version, "base": held}, PUBLISHER)


def await_hello(mesh: ProcessMesh) -> Hello:
    """Publisher: what the receiver has."""
    hello = recv_frame(mesh, RECEIVER, _SMALL_FRAME)
    if hello.get("protocol") != _PROTOCOL:
        raise WeightsRefused(f"the receiver speaks protocol {hello.get('protocol')!r}")
    return Hello(_version(hello), str(hello.get("base", "")))


def send_snapshot(mesh: ProcessMesh, snapshot: WeightSnapshot, held: str = "") -> Sent:
    """Publisher: sends all buckets and waits for the receiver's acknowledgement.

    ``held``: fingerprint of the base that the receiver holds. If it is the snapshot's, deltas are sent.

    Raises EpochCancelled, MeshError, or WeightsRefused if the reply makes no sense.
    """
    snapshot.wait_ready()
    manifest = snapshot.manifest
    direct = mesh.joins_devices
    # Between devices a whole bucket is faster than the host that would have to apply a delta.
    base = None if direct else _base_of(snapshot, held)
    header = {"version": snapshot.version, "direct": direct, "base": held if base else ""}
    send_frame(mesh, {**header, "manifest": manifest.to_json()}, RECEIVER)
    checksums, wire_bytes = [], 0
    for i in range(manifest.buckets):
        bucket = snapshot.bucket(i)
        if base is not None:
            delta = snapshot.delta(i, base)
            send_size(mesh, 0 if delta is None else delta.numel(), RECEIVER)
            bucket = bucket if delta is None else delta
        # A snapshot in host memory travels over a link of devices, too.
        sending = mesh.send_async(bucket.to(mesh.device) if direct else bucket.cpu(), RECEIVER)
        checksums.append(snapshot.checksum(i))
        wire_bytes += bucket.numel()
        mesh.wait(sending)
    send_frame(mesh, {"checksums": checksums}, RECEIVER)
    ack = recv_frame(mesh, RECEIVER, _SMALL_FRAME)
    if _version(ack) != snapshot.version:
        raise WeightsRefused(f"version {snapshot.version} was sent, {_version(ack)} acknowledged")
    return Sent(snapshot.version, fingerprint(checksums), wire_bytes)


def receive_snapshot(
    mesh: ProcessMesh,
    *,
    newer_than: int = -1,
    base: ReceiverBase | None = None,
    limit_bytes: int | None = None,
) -> StagedWeights:
    """Receiver: waits for the next version and stages it in fresh memory.

    ``newer_than``: any version up to this is refused. ``base``: what the hello, or the last
    acknowledgement, told the publisher to be here. ``limit_bytes``: largest buffer to allocate;
    default: the device's whole memory. Call acknowledge() once the engine holds it.

    Raises EpochCancelled, MeshError, or WeightsRefused: old version, malformed, too large, or a
    bucket that does not match its checksum.
    """
    header = recv_frame(mesh, PUBLISHER, _HEADER_FRAME)
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
    wanted = header.get("base")
    if wanted and (base is None or base.fingerprint != wanted or base.manifest != manifest):
        raise WeightsRefused("deltas were announced for weights that are not here")
    flat = torch.empty(
        manifest.total_bytes, dtype=torch.uint8, device=mesh.device if direct else "cpu"
    )
    if wanted and base is not None:
        sums = _receive_deltas(mesh, manifest, flat, base)
    else:
        sums = _receive_whole(mesh, manifest, flat)
    _compare(mesh, version, sums)
    tensors = manifest.views(flat.to(mesh.device))
    keep = manifest.may_be_sparse and not direct
    held = ReceiverBase(manifest, flat, fingerprint(sums)) if keep else None
    return StagedWeights(version, tensors, time.perf_counter() - started, held)


def acknowledge(mesh: ProcessMesh, version: int) -> None:
    """Receiver: version is staged, and the next one may be sent."""
    send_frame(mesh, {"version": version}, PUBLISHER)


def _base_of(snapshot: WeightSnapshot, held: str) -> WeightSnapshot | None:
    """The snapshot before this one, if it is what the receiver holds."""
    base = snapshot.base
    return base if base is not None and held and base.fingerprint == held else None


def _receive_whole(mesh: ProcessMesh, manifest: Manifest, flat: Tensor) -> list[str]:
    """Fills ``flat``; returns the buckets' checksums. One is computed while the next bucket arrives."""
    sums: list[str] = []
    for i in range(manifest.buckets):
        receiving = mesh.recv_async(manifest.bucket(flat, i), PUBLISHER)
        if i:
            sums.append(checksum(manifest.bucket(flat, i - 1)))
        mesh.wait(receiving)
    if manifest.buckets:
        sums.append(checksum(manifest.bucket(flat, manifest.buckets - 1)))
    return sums


def _receive_deltas(
    mesh: ProcessMesh, manifest: Manifest, flat: Tensor, base: ReceiverBase
) -> list[str]:
    """The same from deltas against ``base``. A bucket may come whole."""
    sums: list[str] = []
    for i in range(manifest.buckets):
        bucket = manifest.bucket(flat, i)
        size = recv_size(mesh, PUBLISHER)
        if not 0 <= size <= WORTH * bucket.numel():
            raise WeightsRefused(f"a delta of {size} bytes for a bucket of {bucket.numel()}")
        if size == 0:
            mesh.recv(bucket, PUBLISHER)
        else:
            delta = torch.empty(size, dtype=torch.uint8)
            mesh.recv(delta, PUBLISHER)
            bucket.copy_(manifest.bucket(base.flat, i))
            apply_delta(bucket, delta)
        sums.append(checksum(bucket))
    return sums


def _compare(mesh: ProcessMesh, version: int, sums: list[str]) -> None:
    """Compares the checksums of what arrived with the trailer's. Raises WeightsRefused."""
    trailer = recv_frame(mesh, PUBLISHER, _SMALL_FRAME + 64 * len(sums))
    expected = trailer.get("checksums")
    if not isinstance(expected, list) or len(expected) != len(sums):
        raise WeightsRefused("the checksums do not fit the buckets")
    for i, (found, wanted) in enumerate(zip(sums, expected, strict=True)):
        if found != wanted:
            raise WeightsRefused(f"bucket {i} of version {version} was damaged on the way")


def _version(message: dict[str, Any]) -> int:
    version = message.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or not -1 <= version < 1 << 62:
        raise WeightsRefused(f"{version!r} is no version")
    return version


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
