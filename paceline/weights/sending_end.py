"""Sending end of weights links: one thread a link, each of which sends the newest version that its receiver lacks.

A link thread waits for a version that its receiver does not have, sends it, and then waits for the receiver's
acknowledgement. Links share nothing but what is sent: a slow or stopped receiver holds up only its own thread, and
the versions that pass meanwhile are skipped for it.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import NoReturn

from paceline.mesh.elastic_mesh import EpochCancelled, ProcessMesh
from paceline.process.structured_log import event
from paceline.process.waits import WaitKind, waiting
from paceline.v1 import worker_pb2
from paceline.weights.arriving_weights import WeightSource
from paceline.weights.link_greeting import PUBLISHER, await_hello
from paceline.weights.weight_link import LinkEnd, WeightLink
from paceline.weights.weight_sending import LifeSign, send_life_sign, send_snapshot

_log = logging.getLogger(__name__)


class SendingEnd(LinkEnd):
    """The sending end of any number of links."""

    rank = PUBLISHER
    life = LifeSign()
    sent_bytes = 0
    """Of buckets, over all links, since the start."""
    resumed = 0
    """Transfers that went on where an earlier one had broken off."""

    @abstractmethod
    def newest_for(self, link: WeightLink) -> WeightSource | None:
        """What the link sends next, if its receiver does not have it. Called with the condition held."""

    def set_links(self, links: Sequence[worker_pb2.WeightsLink]) -> None:
        """Converges to these links: new epochs are formed, others withdrawn. Does not block."""
        self._converge(
            {
                (k.epoch, k.receiver.incarnation): WeightLink(
                    k.epoch, k.receiver.worker_id, tree=k.tree
                )
                for k in links
            }
        )

    def transfer(self, link: WeightLink, mesh: ProcessMesh) -> NoReturn:
        hello = await_hello(mesh)
        self._formed(link, has=hello.version)
        has, held, begun = hello.version, hello.base, hello.begun
        while True:
            source = self._await_newer(mesh, link, has)
            started = time.perf_counter()
            with waiting(WaitKind.WEIGHTS, f"sending weights to {link.peer}", link.peer):
                sent = send_snapshot(mesh, source, held, begun, self.life)
            begun = None
            if sent is None:
                continue
            has, held = sent.version, sent.fingerprint
            self.last_transfer_s = time.perf_counter() - started
            with self._changed:
                self.sent_bytes += sent.wire_bytes
                self.resumed += sent.first > 0
            event(
                _log,
                "weights sent",
                epoch=link.epoch,
                peer=link.peer,
                version=sent.version,
                ms=self.last_transfer_s * 1e3,
                bytes=sent.wire_bytes,
                share=sent.wire_bytes / max(1, source.manifest.total_bytes),
                first=sent.first,
            )

    def _await_newer(self, mesh: ProcessMesh, link: WeightLink, has: int) -> WeightSource:
        """Waits for something newer than version ``has``. Raises EpochCancelled."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: link.withdrawn.is_set() or self._newer(link, has) is not None,
                    self.life.every_s,
                )
                source = self._newer(link, has)
            if link.withdrawn.is_set():
                raise EpochCancelled("the link was withdrawn")
            if source is not None:
                return source
            if self.life.shown():
                send_life_sign(mesh)

    def _newer(self, link: WeightLink, has: int) -> WeightSource | None:
        source = self.newest_for(link)
        return source if source is not None and source.version > has else None
