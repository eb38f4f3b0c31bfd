"""Sending end of weights links: one thread a link, each of which sends the newest version that its
receiver lacks.

A link thread waits for a version that its receiver does not have, sends it, and then waits for the
receiver's acknowledgement. Links share nothing but what is sent: a slow or stopped receiver holds
up only its own thread, and the versions that pass meanwhile are skipped for it.

Rank 0 of a replica is source 0 of its links, and announces versions. The other ranks are sources,
too, and answer what the receiver asks of them.
"""

import functools
import logging
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import NoReturn

from paceline.mesh.elastic_mesh import EpochCancelled, ProcessMesh
from paceline.process.compute_device import stream_of_its_own
from paceline.process.structured_log import event
from paceline.process.waits import WaitKind, waiting
from paceline.v1 import worker_pb2
from paceline.weights.arriving_weights import WeightSource
from paceline.weights.link_messages import (
    PROTOCOL,
    PUBLISHER,
    RECEIVER,
    Ask,
    await_hello,
    send_frame,
)
from paceline.weights.weight_link import FORM_S, LinkEnd, WeightLink
from paceline.weights.weight_manifest import WHOLE_SHARE, WeightShare, WeightsRefused
from paceline.weights.weight_sending import LifeSign, Sent, announce, send_share

_log = logging.getLogger(__name__)


class SendingEnd(LinkEnd):
    """The sending end of any number of links."""

    rank = PUBLISHER
    share: WeightShare = WHOLE_SHARE
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
        """Converges to these links: new epochs are formed, others withdrawn. Does not block."""
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
                sent = self._send(mesh, link, functools.partial(_checked, source))
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
            epoch=link.epoch,
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
