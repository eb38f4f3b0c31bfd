"""Receives weights beside the running engine.

    publisher ──► link thread ── StagedWeights ──► on_weights (the engine swaps at a token boundary)

One link at a time. Its thread waits for the next version, or for the link to be replaced, which
unblocks it within a slice; an interrupted transfer leaves nothing behind, and the next link starts
by telling the publisher which version is already here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import torch

from paceline.mesh.elastic_mesh import EpochCancelled, MeshError, ProcessMesh
from paceline.process import structured_log, threads
from paceline.v1 import worker_pb2
from paceline.weights.weight_transfer import (
    RECEIVER,
    StagedWeights,
    WeightsRefused,
    acknowledge,
    receive_snapshot,
    say_hello,
)

_log = logging.getLogger(__name__)

_CLOSE_S = 5.0


class WeightReceiver:
    """``url``: Redis URL of the rendezvous. ``device``: where weights are staged. ``on_weights``:
    called from the link's thread with each new version, in rising order; the next transfer starts
    after it returns. ``on_link_error``: called with the epoch of a link that failed and the reason.
    ``host``: as for ProcessMesh.form().
    """

    def __init__(
        self,
        *,
        url: str,
        run_id: str,
        device: torch.device,
        on_weights: Callable[[StagedWeights], None],
        on_link_error: Callable[[int, str], None],
        host: str | None = None,
    ) -> None:
        self._url = url
        self._run_id = run_id
        self._device = device
        self._host = host
        self._on_weights = on_weights
        self._on_link_error = on_link_error
        self._lock = threading.Lock()
        self._handing_over = threading.Lock()
        self._link: _Link | None = None
        self._threads: list[threading.Thread] = []
        self._version = -1
        self.last_transfer_s = 0.0
        """Duration of the newest complete transfer, from its announcement to intact in memory."""
        threads.on_exit(self._withdraw)

    @property
    def version(self) -> int:
        """Newest version handed to on_weights; -1 for none."""
        return self._version

    def set_link(self, link: worker_pb2.WeightsLink | None, newest: int | None = None) -> None:
        """Converges to this link; another epoch takes the place of the present one. Does not block.

        ``newest``: version that the controller calls the newest. What was received beyond it was
        never committed, and the new link replaces it by an older one.
        """
        with self._lock:
            old = self._link
            if link is not None and old is not None and link.epoch == old.epoch:
                return
            if old is not None:
                old.withdrawn.set()
            self._link = None
            if link is not None:
                self._link = _Link(link.epoch, link.publisher.worker_id, newest)
                thread = threads.start(self._serve, f"receive-{link.epoch}", [self._link])
                self._threads = [t for t in self._threads if t.is_alive()] + [thread]

    def formed_epochs(self) -> list[int]:
        """Epoch of the link, if it is formed and healthy."""
        with self._lock:
            return [self._link.epoch] if self._link is not None and self._link.formed else []

    def close(self) -> None:
        """Withdraws the link and waits for its thread, which ends as soon as on_weights lets it."""
        self._withdraw()
        threads.join(self._threads, _CLOSE_S)

    def _withdraw(self) -> None:
        self.set_link(None)

    def _serve(self, link: _Link) -> None:
        mesh: ProcessMesh | None = None
        try:
            mesh = ProcessMesh.form(
                url=self._url,
                key=f"paceline:{self._run_id}:rdv:link:{link.epoch}",
                rank=RECEIVER,
                size=2,
                device=self._device,
                cancelled=link.withdrawn.is_set,
                host=self._host,
            )
            # Behind the lock: a hand-over by the previous link's thread counts.
            with self._handing_over:
                if link.newest is not None and link.newest < self._version:
                    self._version = -1
                version = self._version
            say_hello(mesh, version)
            link.formed = True
            structured_log.event(
                _log, "weights link formed", epoch=link.epoch, of=link.publisher, has=version
            )
            while True:
                staged = receive_snapshot(mesh, newer_than=self._version)
                self._hand_over(link, staged)
                acknowledge(mesh, staged.version)
                self.last_transfer_s = staged.seconds
                structured_log.event(
                    _log,
                    "weights staged",
                    epoch=link.epoch,
                    version=staged.version,
                    ms=staged.seconds * 1e3,
                )
                # The engine owns them now: do not keep them until the next version comes.
                del staged
        except EpochCancelled:
            pass
        except Exception as error:
            # on_weights included: whatever it was, this link has ended and must be replaced.
            link.formed = False
            if not isinstance(error, MeshError | WeightsRefused):
                _log.exception("weights could not be handed over epoch=%d", link.epoch)
            if not link.withdrawn.is_set():
                structured_log.event(
                    _log,
                    "weights link failed",
                    level=logging.WARNING,
                    epoch=link.epoch,
                    of=link.publisher,
                    error=error,
                )
                self._on_link_error(link.epoch, str(error))
        finally:
            link.formed = False
            if mesh is not None:
                mesh.abandon()

    def _hand_over(self, link: _Link, staged: StagedWeights) -> None:
        with self._handing_over:
            if link.withdrawn.is_set():
                raise EpochCancelled("the link was replaced")
            if staged.version <= self._version:
                raise WeightsRefused(f"version {staged.version} is not newer than {self._version}")
            self._on_weights(staged)
            self._version = staged.version


class _Link:
    def __init__(self, epoch: int, publisher: str, newest: int | None) -> None:
        self.epoch = epoch
        self.publisher = publisher
        self.newest = newest
        self.withdrawn = threading.Event()
        self.formed = False
