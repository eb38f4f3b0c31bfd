"""Weight receiver: stages new versions beside the running engine.

    publisher ──► link thread ── StagedWeights ──► on_weights (the engine swaps at a token boundary)

One link at a time. Its thread waits for the next version, until another link replaces it. An
interrupted transfer leaves nothing behind; the next link begins with the receiver's hello, which tells
the publisher the version that is already here.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from paceline.mesh.elastic_mesh import EpochCancelled, ProcessMesh
from paceline.process.structured_log import event
from paceline.process.waits import WaitKind, waiting
from paceline.v1 import worker_pb2
from paceline.weights.weight_link import LinkEnd, WeightLink
from paceline.weights.weight_manifest import WeightsRefused
from paceline.weights.weight_transfer import (
    RECEIVER,
    ReceiverBase,
    StagedWeights,
    acknowledge,
    receive_snapshot,
    say_hello,
)

HOLD_CHECK_S = 0.05
"""Time after which it is asked again whether an evaluation is under way."""
_log = logging.getLogger(__name__)


class WeightReceiver(LinkEnd):
    """The receiving end of one link at a time."""

    rank = RECEIVER
    thread_name = "receive"

    def __init__(
        self,
        *,
        on_weights: Callable[[StagedWeights], None],
        evaluating: Callable[[], bool] = lambda: False,
        deltas: bool = True,
        **ends: Any,
    ) -> None:
        """``on_weights``: called from the link's thread with each new version, in rising order; the
        next transfer starts after it returns. ``evaluating``: while it is true, a version that has come
        waits, because an evaluated completion is of one version. ``deltas``: keep the newest weights in
        host memory, so that the next version may come as what changed. Other arguments as for LinkEnd."""
        self._deltas = deltas
        self._on_weights = on_weights
        self._evaluating = evaluating
        self._handing_over = threading.Lock()
        self.version = -1
        """Newest version handed to on_weights; -1 for none."""
        self._base: ReceiverBase | None = None
        """The weights that came last. They outlive the link: the next one may go on with deltas."""
        super().__init__(**ends)

    def set_link(self, link: worker_pb2.WeightsLink | None, newest: int | None = None) -> None:
        """Converges to this link; another epoch replaces the present one. Does not block.

        ``newest``: version that the controller calls the newest. Versions received beyond it were
        never committed, and the new link replaces them by an older one. A link with ``reload`` replaces
        them in any case.
        """
        if link is None:
            self._converge({})
        else:
            key = (link.epoch, link.publisher.incarnation)
            ours = WeightLink(link.epoch, link.publisher.worker_id, newest, link.reload)
            self._converge({key: ours})

    def transfer(self, link: WeightLink, mesh: ProcessMesh) -> NoReturn:
        # Behind the lock: a hand-over by the previous link's thread counts.
        with self._handing_over:
            if link.reload or (link.newest is not None and link.newest < self.version):
                self.version = -1
            version = self.version
        base = self._base
        say_hello(mesh, version, base)
        self._formed(link, has=version)
        while True:
            what = f"waiting for weights from {link.peer}"
            with waiting(WaitKind.WEIGHTS, what, link.peer):
                try:
                    staged = receive_snapshot(mesh, newer_than=self.version, base=base)
                except WeightsRefused:
                    # It may be the base that is damaged: the next link brings whole buckets.
                    self._base = None
                    raise
            base = self._base = staged.base if self._deltas else None
            if self.version >= 0 and self._evaluating():
                with waiting(WaitKind.ENGINE, "generating for an evaluation of the loaded version"):
                    while self._evaluating() and not link.withdrawn.wait(HOLD_CHECK_S):
                        pass
            with waiting(WaitKind.WEIGHTS, f"loading weights {staged.version} into the engine"):
                self._hand_over(link, staged)
            acknowledge(mesh, staged.version)
            self.last_transfer_s = staged.seconds
            event(
                _log,
                "weights staged",
                epoch=link.epoch,
                version=staged.version,
                ms=staged.seconds * 1e3,
            )
            # The engine owns them now: do not keep them until the next version comes.
            del staged

    def _hand_over(self, link: WeightLink, staged: StagedWeights) -> None:
        with self._handing_over:
            if link.withdrawn.is_set():
                raise EpochCancelled("the link was replaced")
            if staged.version <= self.version:
                raise WeightsRefused(f"version {staged.version} is not newer than {self.version}")
            self._on_weights(staged)
            self.version = staged.version
