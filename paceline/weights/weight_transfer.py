"""Weight transfer over a link: its protocol, and the receiving of weights.

One transfer over a link, publisher (rank 0) to receiver (rank 1):

    receiver → hello {version it has, fingerprint of the base it holds, what it has begun}      once a link
    publisher → header {version, manifest, base, first bucket} → for each bucket: record, bucket or delta
    receiver → ack {version}

The publisher is a trainer, or a rollout worker that relays what it receives. If both ends hold the same base,
the weights of an earlier version, a bucket may travel as a delta (see bucket_delta).

Invariants:

- What is sent never changes: it is the state at one version, whatever the trainer does.
- Staged weights are complete and intact, or the transfer raises and there are none. Every bucket is compared with
  the trainer's checksum of the whole bucket, however and over however many relays it travelled.
- A transfer that breaks off goes on at the first missing bucket over the next link, if that link's publisher has the
  same checksums for the buckets that are here. If not, it begins anew.
- No size from a message is used before it was checked.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from paceline.mesh.elastic_mesh import ProcessMesh
from paceline.weights.arriving_weights import ArrivingWeights
from paceline.weights.bucket_delta import WORTH, apply_delta
from paceline.weights.bucket_record import ENDS, PATIENCE, WHOLE, BucketRecord, recv_record
from paceline.weights.frames import recv_frame
from paceline.weights.link_greeting import PROTOCOL, PUBLISHER, other_protocol, version_in
from paceline.weights.receiver_base import ReceiverBase
from paceline.weights.tensor_checksum import checksum, weights_digest
from paceline.weights.weight_manifest import Manifest, WeightsRefused

_HEADER_FRAME = 128 << 20


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


@dataclass
class Reception:
    """What a receiver keeps from one link to the next, and what it hears."""

    begun: ArrivingWeights | None = None
    """Of a transfer that broke off."""
    tree: int = 0
    """Of the present link."""
    keep_deltas: bool = False
    began: Callable[[ArrivingWeights], None] = field(default=lambda weights: None)
    """Called when a transfer begins or goes on. From then on the weights fill up."""
    heard: Callable[[], None] = field(default=lambda: None)
    """Called for everything that comes from the publisher."""


def receive_snapshot(
    mesh: ProcessMesh,
    *,
    newer_than: int = -1,
    base: ReceiverBase | None = None,
    limit_bytes: int | None = None,
    device: torch.device | None = None,
    reception: Reception | None = None,
) -> StagedWeights:
    """Receiver: waits for the next version and stages it in fresh memory.

    ``newer_than``: any version up to this is refused. ``base``: what the hello, or the last
    acknowledgement, told the publisher to be here. ``limit_bytes``: largest buffer to allocate;
    default: the device's whole memory. ``device``: where the tensors are staged; default: the mesh's. Call
    acknowledge() once the engine holds it.

    Raises EpochCancelled, MeshError, or WeightsRefused: old version, malformed, too large, or a
    bucket that does not match its checksum. What has come until then is in ``reception.begun``.
    """
    reception, device = reception or Reception(), device or mesh.device
    while True:
        header = _recv_header(mesh, reception)
        started = time.perf_counter()
        version = version_in(header)
        if version <= newer_than:
            raise WeightsRefused(f"version {version} was offered, {newer_than} is here already")
        manifest = Manifest.from_json(
            header.get("manifest"), limit_bytes=limit_bytes or _memory_bytes(device)
        )
        direct = header.get("direct") is True
        if direct and not mesh.joins_devices:
            raise WeightsRefused("buckets were announced over a device link that is not there")
        wanted = header.get("base")
        if not wanted:
            base_here = None
        elif base is None or base.fingerprint != wanted or base.manifest != manifest:
            raise WeightsRefused("deltas were announced for weights that are not here")
        else:
            base_here = base
        if direct:
            flat = torch.empty(manifest.total_bytes, dtype=torch.uint8, device=mesh.device)
            _receive_direct(mesh, version, manifest, flat)
            seconds = time.perf_counter() - started
            return StagedWeights(version, manifest.views(flat), seconds)
        weights = _begin(reception, header, version, manifest)
        if base_here is not None:
            weights.base = base_here.fingerprint
        reception.began(weights)
        if not _receive_buckets(mesh, weights, base_here, reception):
            continue
        reception.begun = None
        tensors = manifest.views(weights.flat.to(device))
        held = None
        if manifest.may_be_sparse:
            held = ReceiverBase(manifest, weights.flat, weights.fingerprint)
        return StagedWeights(version, tensors, time.perf_counter() - started, held)


def _recv_header(mesh: ProcessMesh, reception: Reception) -> dict[str, Any]:
    while True:
        header = recv_frame(mesh, PUBLISHER, _HEADER_FRAME)
        reception.heard()
        if refused := header.get("refused"):
            raise WeightsRefused(str(refused)[:500])
        if header.get("protocol") != PROTOCOL:
            why = other_protocol("publisher", header.get("protocol"), "receiver")
            raise WeightsRefused(why)
        if header.get("waits") is not True:
            return header


def _begin(
    reception: Reception, header: dict[str, Any], version: int, manifest: Manifest
) -> ArrivingWeights:
    """The weights to fill: those that were begun, if the publisher goes on with them."""
    begun, first = reception.begun, header.get("first")
    if first == 0:
        fresh = ArrivingWeights(
            version, manifest, tree=reception.tree, keep_deltas=reception.keep_deltas
        )
        reception.begun = fresh
        return fresh
    if begun is None or (begun.version, begun.held) != (version, first):
        raise WeightsRefused(f"buckets from {first!r} on were offered, which nobody asked for")
    if begun.manifest != manifest:
        raise WeightsRefused(f"version {version} goes on with other tensors than it began with")
    begun.tree = reception.tree
    return begun


def _receive_buckets(
    mesh: ProcessMesh, weights: ArrivingWeights, base: ReceiverBase | None, reception: Reception
) -> bool:
    """Fills ``weights``; False if the publisher will never have the rest. Each bucket is checked while the next one
    arrives."""
    checked: Future[None] | None = None
    try:
        with ThreadPoolExecutor(1, "weights-check") as checking:
            for i in range(weights.held, weights.manifest.buckets):
                record = _recv_record(mesh, reception)
                if record.size == ENDS:
                    return False
                delta = _recv_bucket(mesh, weights.bucket(i), record, base)
                reception.heard()
                if checked is not None:
                    checked.result()
                checked = checking.submit(_check, weights, i, record.checksum, delta, base)
            if checked is not None:
                checked.result()
    except Exception:
        if not mesh.settled:
            weights.leave_memory()
        raise
    return True


def _recv_record(mesh: ProcessMesh, reception: Reception) -> BucketRecord:
    while (record := recv_record(mesh, PUBLISHER)).size == PATIENCE:
        reception.heard()
    return record


def _recv_bucket(
    mesh: ProcessMesh, bucket: Tensor, record: BucketRecord, base: ReceiverBase | None
) -> Tensor | None:
    """Receives a whole bucket into its place, or returns the delta that came in its stead."""
    if record.size == WHOLE:
        mesh.recv(bucket, PUBLISHER)
        return None
    if base is None or not 0 < record.size <= WORTH * bucket.numel():
        raise WeightsRefused(f"a delta of {record.size} bytes for a bucket of {bucket.numel()}")
    delta = torch.empty(record.size, dtype=torch.uint8)
    mesh.recv(delta, PUBLISHER)
    return delta


def _check(
    weights: ArrivingWeights,
    index: int,
    expected: str,
    delta: Tensor | None,
    base: ReceiverBase | None,
) -> None:
    """Adds the bucket to ``weights`` if it matches its checksum. Raises WeightsRefused."""
    bucket = weights.bucket(index)
    if delta is not None and base is not None:
        bucket.copy_(weights.manifest.bucket(base.flat, index))
        apply_delta(bucket, delta)
    _compare(weights.version, index, bucket, expected)
    weights.add(expected, delta)


def _receive_direct(mesh: ProcessMesh, version: int, manifest: Manifest, flat: Tensor) -> None:
    """Fills ``flat`` from the publisher's device. One bucket is checked while the next one arrives."""
    before: tuple[int, Tensor, str] | None = None
    for i in range(manifest.buckets):
        record, bucket = recv_record(mesh, PUBLISHER), manifest.bucket(flat, i)
        if record.size != WHOLE:
            raise WeightsRefused("a bucket between devices travels whole")
        receiving = mesh.recv_async(bucket, PUBLISHER)
        if before is not None:
            _compare(version, *before)
        mesh.wait(receiving)
        before = i, bucket, record.checksum
    if before is not None:
        _compare(version, *before)


def _compare(version: int, index: int, bucket: Tensor, expected: str) -> None:
    if checksum(bucket) != expected:
        raise WeightsRefused(f"bucket {index} of version {version} was damaged on the way")


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
