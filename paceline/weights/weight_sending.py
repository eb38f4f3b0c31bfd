"""Sending end of weights links: one thread a link, each of which announces the newest version that
its receiver lacks, and sends the buckets that are asked for, each as soon as it is there.

A link thread waits for a version that its receiver does not have, sends it, and then waits for the
receiver's acknowledgement. Links share nothing but what is sent: a slow or stopped receiver holds
up only its own thread, and the versions that pass meanwhile are skipped for it.

Rank 0 of a replica is source 0 of its links, and announces versions. The other ranks are sources,
too, and answer what the receiver asks of them.

See weight_transfer for the other end and for what both guarantee.
"""

import logging
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from paceline.mesh.elastic_mesh import EpochCancelled, ProcessMesh
from paceline.process.compute_device import stream_of_its_own
from paceline.process.structured_log import event
from paceline.process.waits import WaitKind, waiting
from paceline.v1 import worker_pb2
from paceline.weights.arriving_weights import GivenUp, WeightSource, fingerprint
from paceline.weights.link_messages import (
    ENDS,
    PATIENCE,
    PROTOCOL,
    PUBLISHER,
    RECEIVER,
    WHOLE,
    Answer,
    Ask,
    await_hello,
    recv_ask,
    recv_frame,
    send_answer,
    send_frame,
    send_record,
    version_in,
)
from paceline.weights.weight_link import FORM_S, LinkEnd, WeightLink
from paceline.weights.weight_manifest import WHOLE_SHARE, WeightShard, WeightsRefused

_log = logging.getLogger(__name__)


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


class SendingEnd(LinkEnd):
    """The sending end of any number of links."""

    rank = PUBLISHER
    share: WeightShard = WHOLE_SHARE
    life = LifeSign()
    sent_bytes = 0
    resumed = 0
    taken_back = 0
    """Publications up to this one were never committed, or nobody is to have them."""

    @property
    def first_source(self) -> int:
        return self.share.source

    @property
    def form_s(self) -> float:
        # The receiver comes to the others when it has met source 0.
        return FORM_S if self.share.source == 0 else 2 * FORM_S

    @abstractmethod
    def newest_for(self, link: WeightLink) -> WeightSource | None:
        """Source that the link sends next, if its receiver lacks it. Needs the condition held."""

    def set_links(self, links: Sequence[worker_pb2.WeightsLink]) -> None:
        """Converges to these links: new ones are formed, others withdrawn. Does not block."""
        desired = {}
        for k in links:
            link = WeightLink(k.epoch, k.receiver.worker_id, tree=k.tree)
            desired[k.epoch, k.receiver.incarnation] = link
        self._converge(desired)

    def transfer(self, link: WeightLink, mesh: ProcessMesh) -> NoReturn:
        with stream_of_its_own(self.device):
            if self.share.source:
                self._formed(link)
                while True:
                    self._send(mesh, link, lambda ask: self._await_publication(link, ask))
            self._announce_all(link, mesh)

    def _announce_all(self, link: WeightLink, mesh: ProcessMesh) -> NoReturn:
        has = await_hello(mesh, self.share.sources)
        self._formed(link, has=has)
        passed: weakref.ref[WeightSource] | None = None
        while True:
            source = self._await_newer(mesh, link, has, passed)
            # Its memory is for the next version as soon as nobody needs it.
            passed = weakref.ref(source)
            announce(mesh, source)
            with waiting(WaitKind.WEIGHTS, f"sending weights to {link.peer}", link.peer):
                sent = self._send(mesh, link, partial(_checked, source))
            del source
            if sent is not None:
                has = sent.version

    def _send(
        self, mesh: ProcessMesh, link: WeightLink, look_up: Callable[[Ask], WeightSource | None]
    ) -> Sent | None:
        sent = send_share(mesh, look_up, self.life)
        if sent is None:
            return None
        self.last_transfer_s = sent.seconds
        with self._changed:
            self.sent_bytes += sent.wire_bytes
            self.resumed += sent.kept > 0
        event(
            _log,
            "weights sent",
            generation=link.generation,
            peer=link.peer,
            version=sent.version,
            ms=sent.seconds * 1e3,
            bytes=sent.wire_bytes,
            share=sent.share,
            kept=sent.kept,
        )
        return sent

    def _await_newer(
        self,
        mesh: ProcessMesh,
        link: WeightLink,
        has: int,
        passed: weakref.ref[WeightSource] | None,
    ) -> WeightSource:
        """Waits for a version above ``has`` that is not ``passed``. Raises EpochCancelled."""

        def newer() -> WeightSource | None:
            source = self._newer(link, has)
            return None if passed is not None and source is passed() else source

        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: link.withdrawn.is_set() or newer() is not None, self.life.every_s
                )
                source = newer()
            if link.withdrawn.is_set():
                raise EpochCancelled("the link was withdrawn")
            if source is not None:
                return source
            if self.life.shown():
                send_frame(mesh, {"protocol": PROTOCOL, "waits": True}, RECEIVER)

    def _await_publication(self, link: WeightLink, ask: Ask) -> WeightSource | None:
        """Waits for this rank's share of what rank 0 has announced; None if it is too late."""

        def is_due() -> bool:
            source = self.newest_for(link)
            newer = source is not None and source.publication >= ask.publication
            return newer or ask.publication <= self.taken_back

        with self._changed:
            self._changed.wait_for(lambda: link.withdrawn.is_set() or is_due())
            source = self.newest_for(link)
        if link.withdrawn.is_set():
            raise EpochCancelled("the link was withdrawn")
        return None if source is None or source.publication != ask.publication else source

    def _newer(self, link: WeightLink, has: int) -> WeightSource | None:
        source = self.newest_for(link)
        return source if source is not None and source.version > has else None


def _checked(source: WeightSource, ask: Ask) -> WeightSource:
    if (ask.version, ask.publication) != (source.version, source.publication):
        raise WeightsRefused(f"version {source.version} was announced, {ask.version} asked for")
    return source


@dataclass(frozen=True)
class _Granted:
    source: WeightSource
    missing: tuple[int, ...]
    kept: int
    base: Any
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
    try:
        kept = _is_here(mesh, source, ask, life)
    except GivenUp:
        send_answer(mesh, Answer())
        return None
    base = source.base_for(ask.base)
    send_answer(mesh, Answer(True, kept, base is not None))
    if not kept:
        return None
    have = set(ask.have)
    missing = tuple(i for i in source.share.buckets(source.manifest) if i not in have)
    return _Granted(source, missing, len(have), base)


def _is_here(mesh: ProcessMesh, source: WeightSource, ask: Ask, life: LifeSign) -> bool:
    if not ask.have:
        return True
    if not set(source.share.buckets(source.manifest)).issuperset(ask.have):
        return False
    for i in ask.have:
        _await_bucket(mesh, source, i, life, lambda: send_answer(mesh, None))
    return fingerprint([source.checksum(i) for i in ask.have]) == ask.have_fingerprint


def _send_buckets(mesh: ProcessMesh, granted: _Granted, life: LifeSign) -> Sent | None:
    source, base = granted.source, granted.base
    wire_bytes, beat = 0, partial(send_record, mesh, PATIENCE)
    bounce = list[Tensor]()
    if source.flat.device.type == "cuda":
        # A copy to memory that is not page-locked is four times as slow.
        size = source.manifest.bucket_bytes
        bounce = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

    def prepare(i: int) -> tuple[int, Tensor]:
        """Bucket ``i`` as it travels; a copy to the host may be under way. A snapshot computes
        checksum and delta when it is first asked, for all links."""
        source.checksum(i)
        if base is not None and (delta := source.delta(i, base)) is not None:
            return delta.numel(), delta
        bucket = source.bucket(i)
        if bounce:
            bounce.reverse()  # the other one is being sent
            bucket = bounce[0][: bucket.numel()].copy_(bucket, non_blocking=True)
        return WHOLE, bucket

    prepared: tuple[int, Tensor] | None = None
    for i, following in zip(granted.missing, [*granted.missing[1:], None], strict=False):
        try:
            _await_bucket(mesh, source, i, life, beat)
        except GivenUp:
            send_record(mesh, ENDS)
            return None
        size, bucket = prepared or prepare(i)
        if bounce:
            torch.cuda.current_stream().synchronize()
        send_record(mesh, size, source.checksum(i))
        sending = mesh.send_async(bucket, RECEIVER)
        prepared = None
        if following is not None and _is_there(source, following):
            prepared = prepare(following)  # while that one is on its way
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
