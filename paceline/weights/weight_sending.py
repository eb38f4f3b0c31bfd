"""Sending of weights over a link: a header, then each bucket as soon as it is there, whole or as a delta.

See weight_transfer for the other end and for what both guarantee.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.mesh.elastic_mesh import EpochCancelled, ProcessMesh
from paceline.weights.arriving_weights import Begun, GivenUp, WeightSource, fingerprint
from paceline.weights.bucket_record import ENDS, PATIENCE, WHOLE, BucketRecord, send_record
from paceline.weights.frames import send_frame
from paceline.weights.link_greeting import PROTOCOL, RECEIVER, await_acknowledgement
from paceline.weights.weight_manifest import WeightsRefused


@dataclass(frozen=True)
class LifeSign:
    """How a publisher that waits for its own source tells its receiver that it lives."""

    every_s: float = 60.0
    shown: Callable[[], bool] = lambda: False
    """Whether the publisher does wait for its source. One that is busy with something else lets its receiver look
    for another."""


@dataclass(frozen=True)
class Sent:
    """A finished transfer, as the publisher sees it."""

    version: int
    fingerprint: str
    wire_bytes: int
    """Of the buckets, whole or as deltas."""
    first: int = 0
    """Bucket at which it began; above 0 if it went on with an earlier transfer."""


def send_snapshot(
    mesh: ProcessMesh,
    source: WeightSource,
    held: str = "",
    begun: Begun | None = None,
    life: LifeSign = LifeSign(),
) -> Sent | None:
    """Publisher: sends all buckets, each as soon as it is there, and waits for the receiver's acknowledgement.

    ``held``: fingerprint of the base that the receiver holds. If it is the source's, deltas are sent. ``begun``: what
    the receiver has of a version already.

    Returns None if the source was given up; the receiver knows, and takes another version. Raises EpochCancelled,
    MeshError, or WeightsRefused if the reply makes no sense.
    """
    source.wait_ready()
    manifest = source.manifest
    direct = mesh.joins_devices and source.flat.device == mesh.device
    # Between devices a whole bucket is faster than the host that would have to apply a delta.
    base = None if direct else source.base_for(held)
    try:
        first = 0 if direct else _first_missing(mesh, source, begun, life)
    except GivenUp:
        return None
    header = {"protocol": PROTOCOL, "version": source.version, "direct": direct, "first": first}
    header |= {"base": held if base is not None else "", "manifest": manifest.to_json()}
    send_frame(mesh, header, RECEIVER)
    wire_bytes = 0
    for i in range(first, manifest.buckets):
        try:
            _await_bucket(mesh, source, i, life, lambda: _beat(mesh))
        except GivenUp:
            send_record(mesh, BucketRecord(ENDS), RECEIVER)
            return None
        bucket, delta = source.bucket(i), None if base is None else source.delta(i, base)
        size = WHOLE if delta is None else delta.numel()
        send_record(mesh, BucketRecord(size, source.checksum(i)), RECEIVER)
        bucket = bucket if delta is None else delta
        sending = mesh.send_async(bucket if direct else bucket.cpu(), RECEIVER)
        if i + 1 < manifest.buckets and source.wait_bucket(i + 1, 0):
            # A snapshot computes these when it is first asked: while the bucket before is on its way.
            source.checksum(i + 1)
            if base is not None:
                source.delta(i + 1, base)
        wire_bytes += bucket.numel()
        mesh.wait(sending)
    staged = await_acknowledgement(mesh)
    if staged != source.version:
        raise WeightsRefused(f"version {source.version} was sent, {staged} acknowledged")
    sums = [source.checksum(i) for i in range(manifest.buckets)]
    return Sent(source.version, fingerprint(sums), wire_bytes, first)


def send_life_sign(mesh: ProcessMesh) -> None:
    """Publisher: tells a receiver that waits for a header that the publisher waits for its own source."""
    send_frame(mesh, {"protocol": PROTOCOL, "waits": True}, RECEIVER)


def _beat(mesh: ProcessMesh) -> None:
    send_record(mesh, BucketRecord(PATIENCE), RECEIVER)


def _first_missing(
    mesh: ProcessMesh, source: WeightSource, begun: Begun | None, life: LifeSign
) -> int:
    """Bucket at which the transfer begins: behind those that the receiver has, if they are the source's."""
    if begun is None or begun.version != source.version or not begun.buckets:
        return 0
    if begun.buckets > source.manifest.buckets:
        return 0
    for i in range(begun.buckets):
        _await_bucket(mesh, source, i, life, lambda: send_life_sign(mesh))
    same = fingerprint([source.checksum(i) for i in range(begun.buckets)]) == begun.fingerprint
    return begun.buckets if same else 0


def _await_bucket(
    mesh: ProcessMesh, source: WeightSource, index: int, life: LifeSign, beat: Callable[[], None]
) -> None:
    while not source.wait_bucket(index, life.every_s):
        if mesh.cancelled():
            raise EpochCancelled("the link was withdrawn")
        if life.shown():
            beat()
