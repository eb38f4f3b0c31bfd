"""Publishes weights: one snapshot on the training path, the rest in the background.

    training thread ── publish(v) ──► newest snapshot ──► link thread ──► receiver
                                             └──────────► link thread ──► receiver

A link thread consumes the newest snapshot; it waits for one that its receiver does not have, for
the receiver's acknowledgement, or for its link to be withdrawn, which unblocks it from anything
else within a slice. Links share nothing but the snapshot: a slow or stopped receiver holds up only
its own thread, and versions that pass meanwhile are skipped for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from paceline.mesh.elastic_mesh import EpochCancelled, MeshError, ProcessMesh
from paceline.process import structured_log, threads
from paceline.v1 import worker_pb2
from paceline.weights.weight_transfer import (
    PUBLISHER,
    SnapshotPool,
    WeightSnapshot,
    WeightsRefused,
    await_hello,
    send_snapshot,
)

_log = logging.getLogger(__name__)

_CLOSE_S = 5.0


class WeightPublisher:
    """``url``: Redis URL of the rendezvous. ``device``: where the weights are. ``on_link_error``:
    called from a link's thread, once, with the epoch of a link that failed and the reason; the
    link stays dead until another epoch takes its place. ``host``: as for ProcessMesh.form().
    """

    def __init__(
        self,
        *,
        url: str,
        run_id: str,
        device: torch.device,
        on_link_error: Callable[[int, str], None],
        host: str | None = None,
    ) -> None:
        self._url = url
        self._run_id = run_id
        self._device = device
        self._host = host
        self._on_link_error = on_link_error
        self._pool = SnapshotPool()
        self._changed = threading.Condition()
        self._newest: WeightSnapshot | None = None
        self._links: dict[int, _Link] = {}
        self._threads: list[threading.Thread] = []
        threads.on_exit(self._withdraw)
        self.last_transfer_s = 0.0
        """Duration of the newest complete transfer, acknowledgement included."""

    def publish(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> float:
        """Makes these weights the newest version; returns the seconds that took the caller.

        Copies the tensors once and returns; on a CUDA device even the copy runs in the background,
        in the order of the current stream. A version that is not newer is ignored.
        """
        started = time.perf_counter()
        if version > self.version:
            snapshot = WeightSnapshot.take(version, named_tensors, self._pool)
            with self._changed:
                self._newest = snapshot
                self._changed.notify_all()
        return time.perf_counter() - started

    def forget(self) -> None:
        """What was published was never committed: the next version counts as newer, whatever it is."""
        with self._changed:
            self._newest = None

    @property
    def version(self) -> int:
        """Newest version published; -1 for none."""
        newest = self._newest
        return -1 if newest is None else newest.version

    def set_links(self, links: Sequence[worker_pb2.WeightsLink]) -> None:
        """Converges to these links: new epochs are formed, others withdrawn. Does not block."""
        wanted = {link.epoch: link for link in links}
        with self._changed:
            for epoch in [e for e in self._links if e not in wanted]:
                self._links.pop(epoch).withdrawn.set()
            for epoch, link in wanted.items():
                if epoch not in self._links:
                    self._links[epoch] = started = _Link(epoch, link.receiver.worker_id)
                    thread = threads.start(self._serve, f"publish-{epoch}", [started])
                    self._threads = [t for t in self._threads if t.is_alive()] + [thread]
            self._changed.notify_all()

    def formed_epochs(self) -> list[int]:
        """Epochs of the links that are formed and healthy."""
        with self._changed:
            return sorted(e for e, link in self._links.items() if link.formed)

    def close(self) -> None:
        """Withdraws all links and waits for their threads, which end at once."""
        self._withdraw()
        threads.join(self._threads, _CLOSE_S)

    def _withdraw(self) -> None:
        self.set_links([])

    def _serve(self, link: _Link) -> None:
        mesh: ProcessMesh | None = None
        try:
            mesh = ProcessMesh.form(
                url=self._url,
                key=f"paceline:{self._run_id}:rdv:link:{link.epoch}",
                rank=PUBLISHER,
                size=2,
                device=self._device,
                cancelled=link.withdrawn.is_set,
                host=self._host,
            )
            has = await_hello(mesh)
            link.formed = True
            structured_log.event(
                _log, "weights link formed", epoch=link.epoch, to=link.receiver, has=has
            )
            while True:
                has = self._send_newer(mesh, link, has)
        except EpochCancelled:
            pass
        except (MeshError, WeightsRefused) as error:
            link.formed = False
            if not link.withdrawn.is_set():
                structured_log.event(
                    _log,
                    "weights link failed",
                    level=logging.WARNING,
                    epoch=link.epoch,
                    to=link.receiver,
                    error=error,
                )
                self._on_link_error(link.epoch, str(error))
        finally:
            link.formed = False
            if mesh is not None:
                mesh.abandon()

    def _send_newer(self, mesh: ProcessMesh, link: _Link, has: int) -> int:
        """Waits for a version newer than ``has`` and sends it; returns it."""
        with self._changed:
            self._changed.wait_for(lambda: link.withdrawn.is_set() or self.version > has)
            snapshot = self._newest
        if link.withdrawn.is_set() or snapshot is None:
            raise EpochCancelled("the link was withdrawn")
        started = time.perf_counter()
        send_snapshot(mesh, snapshot)
        self.last_transfer_s = time.perf_counter() - started
        structured_log.event(
            _log,
            "weights sent",
            epoch=link.epoch,
            to=link.receiver,
            version=snapshot.version,
            ms=self.last_transfer_s * 1e3,
        )
        return snapshot.version


class _Link:
    def __init__(self, epoch: int, receiver: str) -> None:
        self.epoch = epoch
        self.receiver = receiver
        self.withdrawn = threading.Event()
        self.formed = False
