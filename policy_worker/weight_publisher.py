"""Weight publisher: a snapshot on the training path, encoding and sending in the background.

    training thread ── publish(v) ──► newest snapshot ──► link thread ──► receiver
                                             └──────────► link thread ──► receiver

A link thread consumes the newest snapshot. It waits for one that its receiver does not have, and then
for the receiver's acknowledgement. Links share nothing but the snapshot: a slow or stopped receiver
holds up only its own thread, and the versions that pass meanwhile are skipped for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from torch import Tensor

from paceline.mesh.elastic_mesh import EpochCancelled, ProcessMesh
from paceline.process.structured_log import event
from paceline.process.waits import WaitKind, waiting
from paceline.v1 import worker_pb2
from paceline.weights.weight_link import LinkEnd, WeightLink
from paceline.weights.weight_snapshot import SnapshotPool, WeightSnapshot, WireDtype
from paceline.weights.weight_transfer import PUBLISHER, Sent, await_hello, send_snapshot

_log = logging.getLogger(__name__)


class WeightPublisher(LinkEnd):
    """The sending end of any number of links."""

    rank = PUBLISHER
    thread_name = "publish"

    def __init__(
        self,
        *,
        wire: WireDtype | None = None,
        deltas: bool = True,
        on_host: bool = False,
        **ends: Any,
    ) -> None:
        """``wire``: the type in which weights travel; default: the tensors' own. ``deltas``: keep the version before,
        so that the newest may travel as what changed. ``on_host``: keep the snapshots in host memory. Other arguments as
        for LinkEnd."""
        self._deltas = deltas
        self._on_host = on_host
        self._wire = wire or WireDtype()
        self._pool = SnapshotPool()
        self._newest: WeightSnapshot | None = None
        super().__init__(**ends)

    def publish(
        self,
        version: int,
        named_tensors: Iterable[tuple[str, Tensor]],
        layout: Sequence[tuple[str, Tensor]] | None = None,
    ) -> float:
        """Makes these weights the newest version; returns the seconds that the caller spent on it.

        Copies the tensors once and returns; on a CUDA device even the copy runs in the background,
        in the order of the current stream. A version that is not newer is ignored. ``layout``: see WeightSnapshot.take().
        """
        started = time.perf_counter()
        if version > self.version:
            base = self._newest
            if base is not None:
                # One base is kept: a receiver that has an earlier version gets whole buckets.
                base.forget_base()
            snapshot = WeightSnapshot.take(
                version,
                named_tensors,
                self._pool,
                wire=self._wire,
                layout=layout,
                on_host=self._on_host,
            )
            if self._deltas:
                snapshot.follow(base)
            with self._changed:
                self._newest = snapshot
                self._changed.notify_all()
        return time.perf_counter() - started

    def forget(self) -> None:
        """The published version was never committed: the next one counts as newer, whatever its number."""
        with self._changed:
            self._newest = None

    @property
    def version(self) -> int:
        """Newest version published; -1 for none."""
        newest = self._newest
        return -1 if newest is None else newest.version

    def set_links(self, links: Sequence[worker_pb2.WeightsLink]) -> None:
        """Converges to these links: new epochs are formed, others withdrawn. Does not block."""
        self._converge(
            {
                (k.epoch, k.receiver.incarnation): WeightLink(k.epoch, k.receiver.worker_id)
                for k in links
            }
        )

    def transfer(self, link: WeightLink, mesh: ProcessMesh) -> NoReturn:
        hello = await_hello(mesh)
        self._formed(link, has=hello.version)
        has, held = hello.version, hello.base
        while True:
            sent = self._send_newer(mesh, link, has, held)
            has, held = sent.version, sent.fingerprint

    def _send_newer(self, mesh: ProcessMesh, link: WeightLink, has: int, held: str) -> Sent:
        """Waits for a version newer than ``has`` and sends it, as deltas if ``held`` is its base."""
        with self._changed:
            self._changed.wait_for(lambda: link.withdrawn.is_set() or self.version > has)
            snapshot = self._newest
        if link.withdrawn.is_set() or snapshot is None:
            raise EpochCancelled("the link was withdrawn")
        started = time.perf_counter()
        with waiting(WaitKind.WEIGHTS, f"sending weights to {link.peer}", link.peer):
            sent = send_snapshot(mesh, snapshot, held)
        self.last_transfer_s = time.perf_counter() - started
        event(
            _log,
            "weights sent",
            epoch=link.epoch,
            peer=link.peer,
            version=snapshot.version,
            ms=self.last_transfer_s * 1e3,
            bytes=sent.wire_bytes,
            share=sent.wire_bytes / max(1, snapshot.manifest.total_bytes),
        )
        return sent
