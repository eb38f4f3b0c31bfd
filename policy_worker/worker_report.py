"""Worker report: what a policy worker reports to the controller, and where it stands among mesh
epochs.

The training thread writes, and the session's thread reads: each change replaces one snapshot.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.process.kernel_state import kernel_state
from paceline.process.waits import LEAST_AGE_S, Wait, WaitKind
from paceline.process.worker_resources import Resources
from paceline.v1 import worker_pb2
from policy_worker.model.train_state import NO_VERSION, TrainState


@dataclass(slots=True)
class EpochState:
    """Mesh epochs of this replica; 0: none."""

    wanted: int = 0
    """Newest epoch that a directive has named. Written by the session's thread."""
    formed: int = 0
    """The epoch whose mesh this replica is in, with the state that all members hold."""
    ended: int = 0
    """Newest epoch that ended for this replica before the controller named another one."""


@dataclass(frozen=True, slots=True)
class Standing:
    """State of the training thread at one moment."""

    lifecycle: worker_pb2.Lifecycle = worker_pb2.LIFECYCLE_STARTING
    progress: int = 0
    busy: bool = True
    """The thread has work to do: a worker that is busy without progress is wedged."""
    activity: str = "loading the model"
    mesh_epoch: int = 0
    state_version: int = NO_VERSION


class PolicyReport:
    """Written on the training thread; ``report`` may be called on any."""

    def __init__(self, epochs: EpochState | None = None) -> None:
        self.epochs = epochs or EpochState()
        self.state: TrainState | None = None
        self.now = Standing()
        self._resources = Resources()

    def work(self, activity: str) -> None:
        self.progressed(busy=True, activity=activity)

    def rest(self, activity: str) -> None:
        self.progressed(busy=False, activity=activity)

    def progressed(self, **changes: Any) -> None:
        """A part of the work is done."""
        self._change(progress=self.now.progress + 1, **changes)

    def enter(self, lifecycle: worker_pb2.Lifecycle) -> None:
        self._change(lifecycle=lifecycle)

    def refresh(self) -> None:
        """The state or the epoch has changed."""
        self._change()

    def report(self, link_epochs: list[int], waits: Sequence[Any] = ()) -> worker_pb2.Report:
        now = self.now
        return worker_pb2.Report(
            lifecycle=now.lifecycle,
            progress=now.progress,
            busy=now.busy,
            mesh_epoch=now.mesh_epoch,
            state_version=now.state_version,
            link_epochs=link_epochs,
            gauges=self._resources.read(),
            activity=now.activity,
            waits=waits,
        )

    def _change(self, **changes: Any) -> None:
        version = NO_VERSION if self.state is None else self.state.version
        self.now = replace(
            self.now, mesh_epoch=self.epochs.formed, state_version=version, **changes
        )


class StuckRanks:
    """Ranks of a replica that the kernel does not run: stopped, or in an uninterruptible wait. Rank
    0 waits for them in a collective, and its reports go on. So it alone can say whose fault the
    wait is. Asked for each report: one read of /proc for each rank of this host."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._since: dict[int, float] = {}

    def waits(self, least_s: float = LEAST_AGE_S) -> list[Wait]:
        """One for each rank that was found so at every question of at least the last
        ``least_s``."""
        found, now = [], time.monotonic()
        for rank, pid in enumerate(self._pids, 1):
            state = kernel_state(pid)
            if state is None or not (state.stopped or state.uninterruptible):
                self._since.pop(rank, None)
                continue
            age_s = now - self._since.setdefault(rank, now)
            how = "stopped" if state.stopped else state.words
            if age_s >= least_s:
                found.append(Wait(WaitKind.RANK, f"rank {rank}, {how}", str(pid), age_s))
        return found
