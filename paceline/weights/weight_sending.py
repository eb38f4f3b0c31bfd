"""Sending of weights over a link: an announcement, then the buckets that a receiver asks for, each
as soon as it is there.

See weight_transfer for the other end and for what both guarantee.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.mesh.elastic_mesh import EpochCancelled, ProcessMesh
from paceline.weights.arriving_weights import GivenUp, WeightSource, fingerprint
from paceline.weights.link_messages import (
    ENDS,
    PATIENCE,
    PROTOCOL,
    RECEIVER,
    WHOLE,
    Answer,
    Ask,
    recv_ask,
    recv_frame,
    send_answer,
    send_frame,
    send_record,
    version_in,
)
from paceline.weights.weight_manifest import WeightsRefused


@dataclass(frozen=True)
class LifeSign:
    """How a publisher that waits for its own source tells its receiver that it lives."""

    every_s: float = 60.0
    shown: Callable[[], bool] = lambda: False
    """True while the publisher waits for its source. If it is busy with something else, its
    receiver looks for another source."""


@dataclass(frozen=True)
class Sent:
    """A finished transfer, as a source sees it."""

    version: int
    wire_bytes: int
    kept: int
    """Buckets that an earlier transfer had brought."""
    share: float
    """``wire_bytes`` as a share of the source's."""
    seconds: float


@dataclass(frozen=True)
class _Granted:
    source: WeightSource
    missing: tuple[int, ...]
    kept: int
    base: Any
    direct: bool
    began: float = field(default_factory=time.perf_counter)


def announce(mesh: ProcessMesh, source: WeightSource) -> None:
    """Source 0 of a link: tells the receiver of a version that it does not have."""
    header = {"protocol": PROTOCOL, "version": source.version, "publication": source.publication}
    send_frame(mesh, header | {"manifest": source.manifest.to_json()}, RECEIVER)


def send_share(
    mesh: ProcessMesh, look_up: Callable[[Ask], WeightSource | None], life: LifeSign = LifeSign()
) -> Sent | None:
    """Source: answers the receiver until it wants the share sent, sends it, and waits for the
    acknowledgement.

    ``look_up``: the weights that are asked for; None if they are not here and never will be.

    Returns None if the receiver was told that this source will not have the version, or does
    without it. Raises EpochCancelled, MeshError, or WeightsRefused if what the receiver says makes
    no sense.
    """
    granted: _Granted | None = None
    while True:
        ask = recv_ask(mesh)
        if ask is False:
            return None
        if isinstance(ask, Ask):
            granted = _answer(mesh, look_up(ask), ask, life)
        elif granted is None:
            raise WeightsRefused("the receiver asked for weights before they were granted")
        else:
            return _send_buckets(mesh, granted, life)


def _answer(
    mesh: ProcessMesh, source: WeightSource | None, ask: Ask, life: LifeSign
) -> _Granted | None:
    if source is None:
        send_answer(mesh, Answer())
        return None
    source.wait_ready()
    direct = mesh.joins_devices and source.flat.device == mesh.device
    try:
        kept = _is_here(mesh, source, ask, life, direct=direct)
    except GivenUp:
        send_answer(mesh, Answer())
        return None
    # Between devices a whole bucket is faster than the host that would have to apply a delta.
    base = None if direct else source.base_for(ask.base)
    send_answer(mesh, Answer(True, kept, base is not None, direct))
    if not kept:
        return None
    have = set(ask.have)
    missing = tuple(i for i in source.share.buckets(source.manifest) if i not in have)
    return _Granted(source, missing, len(have), base, direct)


def _is_here(
    mesh: ProcessMesh, source: WeightSource, ask: Ask, life: LifeSign, *, direct: bool
) -> bool:
    if not ask.have:
        return True
    mine = set(source.share.buckets(source.manifest))
    if direct or not mine.issuperset(ask.have):
        return False
    for i in ask.have:
        _await_bucket(mesh, source, i, life, lambda: send_answer(mesh, None))
    return fingerprint([source.checksum(i) for i in ask.have]) == ask.have_fingerprint


def _send_buckets(mesh: ProcessMesh, granted: _Granted, life: LifeSign) -> Sent | None:
    source, base, direct = granted.source, granted.base, granted.direct
    wire_bytes, beat = 0, partial(send_record, mesh, PATIENCE)
    pinned: Tensor | None = None
    for i, following in zip(granted.missing, [*granted.missing[1:], None], strict=False):
        try:
            _await_bucket(mesh, source, i, life, beat)
        except GivenUp:
            send_record(mesh, ENDS)
            return None
        bucket, delta = source.bucket(i), None if base is None else source.delta(i, base)
        size = WHOLE if delta is None else delta.numel()
        send_record(mesh, size, source.checksum(i))
        bucket = bucket if delta is None else delta
        if not direct and bucket.device.type == "cuda":
            # Reused: the bucket before has been sent. A copy to memory that is not pinned is four
            # times as slow.
            if pinned is None or pinned.numel() < bucket.numel():
                pinned = torch.empty(bucket.numel(), dtype=torch.uint8, pin_memory=True)
            bucket = pinned[: bucket.numel()].copy_(bucket)
        sending = mesh.send_async(bucket if direct else bucket.cpu(), RECEIVER)
        if following is not None and _is_there(source, following):
            # A snapshot computes these when it is first asked: while the bucket before is on its
            # way.
            source.checksum(following)
            if base is not None:
                source.delta(following, base)
        wire_bytes += bucket.numel()
        mesh.wait(sending)
    staged = version_in(recv_frame(mesh, RECEIVER))
    if staged != source.version:
        raise WeightsRefused(f"version {source.version} was sent, {staged} acknowledged")
    seconds = time.perf_counter() - granted.began
    share = wire_bytes / max(1, source.flat.numel())
    return Sent(source.version, wire_bytes, granted.kept, share, seconds)


def _is_there(source: WeightSource, index: int) -> bool:
    try:
        return source.wait_bucket(index, 0)
    except GivenUp:
        return False  # and the receiver is told when its turn comes


def _await_bucket(
    mesh: ProcessMesh, source: WeightSource, index: int, life: LifeSign, beat: Callable[[], None]
) -> None:
    while not source.wait_bucket(index, life.every_s):
        if mesh.cancelled():
            raise EpochCancelled("the link was withdrawn")
        if life.shown():
            beat()
