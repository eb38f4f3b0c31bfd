"""Blocking control-plane client of the training thread, with calls that a condition ends early.

The session and all calls run on an event loop in a background thread. The training thread waits for
the controller here and nowhere else.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config.schema import Config
from paceline.errors import UserError
from paceline.process.kernel_state import kernel_state
from paceline.process.structured_log import event
from paceline.process.threads import BackgroundLoop
from paceline.process.waits import LEAST_AGE_S, Wait, WaitKind
from paceline.process.worker_resources import Resources
from paceline.rpc.client import ControlPlane, RequestRefused
from paceline.rpc.session import WorkerSession
from paceline.v1 import common_pb2, worker_pb2
from paceline.worker_pools import seat_of
from policy_worker.model.train_state import NO_VERSION, TrainState

log = logging.getLogger(__name__)


class BlockingControlPlane:
    """Membership and calls of one policy worker. Methods are for the training thread."""

    def __init__(
        self,
        config: Config,
        addresses: Sequence[str],
        *,
        worker_id: str,
        report: Callable[[], worker_pb2.Report],
        tensor_host: str,
        run_dir: Path | None = None,
    ) -> None:
        self.worker_id = worker_id
        self._wake = threading.Event()
        self._plane = ControlPlane.from_config(config, addresses, run_dir)
        self._background = BackgroundLoop()
        self._session = WorkerSession(
            self._plane,
            worker_id=worker_id,
            role=common_pb2.ROLE_POLICY,
            config=config,
            report=report,
            tensor_host=tensor_host,
            ranks=config.fleet.policy_ranks,
            seat=seat_of(config, worker_id),
        )
        self._session.on_directive(self._received)
        self._session.on_rejoin(lambda _: self._wake.set())
        self._running: Future[None] | None = None
        self.stopped_at = math.inf
        """When the controller sent STOPPED (monotonic); infinite before."""
        self.leaving = False
        """A signal has told this process to leave."""

    def _received(self, directive: worker_pb2.Directive) -> None:
        if directive.lifecycle == worker_pb2.LIFECYCLE_STOPPED:
            self.stopped_at = min(self.stopped_at, time.monotonic())
        self._wake.set()

    def on_directive(self, callback: Callable[[worker_pb2.Directive], None]) -> None:
        """``callback`` runs on the background thread and must not block. A wait looks again after
        it."""
        self._session.on_directive(callback)
        self._session.on_directive(lambda _: self._wake.set())

    def register(self) -> worker_pb2.RegisterReply:
        """Joins the fleet without any state. Raises RequestRefused if the controller refuses this
        worker, for example because its config differs."""
        reply = self._background.run(self._session.register())
        self._running = self._background.submit(self._session.run())
        self._running.add_done_callback(lambda _: self._wake.set())
        return reply

    @property
    def caller(self) -> common_pb2.Caller:
        return self._session.caller

    @property
    def directive(self) -> worker_pb2.Directive | None:
        """Newest directive of this incarnation; any thread."""
        return self._session.directive

    @property
    def mesh(self) -> worker_pb2.PolicyMesh | None:
        """The mesh that this incarnation belongs to; None for none. Any thread."""
        directive = self._session.directive
        if directive is None or not directive.HasField("mesh"):
            return None
        own = self._session.caller.incarnation
        return directive.mesh if any(m.incarnation == own for m in directive.mesh.members) else None

    def epoch_is_over(self, epoch: int) -> bool:
        """True if the newest directive names no mesh of this incarnation, or another epoch."""
        mesh = self.mesh
        return mesh is None or mesh.epoch != epoch

    @property
    def turn_is_over(self) -> bool:
        """The newest directive asks for the device of this worker. Any thread."""
        directive = self._session.directive
        return directive is not None and directive.HasField("seat") and not directive.seat.hold

    def step_is_left(self) -> bool:
        """True if the run stops without the step that is computed, or has ended, or the session
        has: the next wait says why."""
        if self.stopped or (self._running is not None and self._running.done()):
            return True
        directive = self.directive
        return directive is not None and directive.leave_step

    @property
    def stopped(self) -> bool:
        """The controller has sent STOPPED."""
        return self.stopped_at < math.inf

    def wait(self, done: Callable[[], bool]) -> None:
        """Blocks until ``done()``, which is evaluated after every directive and reply, and each
        second. Raises the error that ended the session, if one did."""
        while True:
            self._wake.clear()
            if self._running is not None and self._running.done():
                self._running.result()
            if done():
                return
            self._wake.wait(1.0)

    def call(self, method: str, request: Any, over: Callable[[], bool]) -> Any | None:
        """The reply; None if ``over()`` turned true first. Raises RequestRefused."""
        return self._await(self._background.submit(self._plane.call(method, request, None)), over)

    def post(
        self,
        method: str,
        request: Any,
        then: Callable[[Any], None] = lambda _: None,
        timeout_s: float = 30.0,
    ) -> Future[None]:
        """Calls in the background, from any thread. Refusals and outages are logged, not raised."""

        async def send() -> None:
            try:
                then(await self._plane.call(method, request, timeout_s))
            except Exception as error:
                event(log, "call failed", logging.WARNING, method=method, error=error)

        return self._background.submit(send())

    def report_failure(self, epoch: int, detail: str, *, is_link: bool = False) -> None:
        """Reports a failed epoch of the policy mesh or of a weights link, from any thread."""
        error = worker_pb2.PeerError(
            caller=self.caller, epoch=epoch, is_link=is_link, detail=detail
        )
        self.post("WorkerService.ReportPeerError", error)

    def leave(self) -> None:
        """For a signal's handler, which takes no lock: the answer to the report ends a wait."""
        self.leaving = True
        self.poke()

    @property
    def leaves_last(self) -> bool:
        """This process was told to leave, and no other member of its mesh has the state."""
        mesh = self.mesh
        return self.leaving and mesh is not None and len(mesh.members) == 1

    def poke(self) -> None:
        """Has the session send a report now."""
        self._session.poke()

    def close(self) -> None:
        """Sends a last report and ends the session."""
        if self._running is not None:
            self._background.run(self._session.close())
        self._background.run(self._plane.close())
        self._background.close()

    def _await(self, future: Future[Any], over: Callable[[], bool]) -> Any | None:
        future.add_done_callback(lambda _: self._wake.set())
        try:
            self.wait(lambda: future.done() or over())
        finally:
            if not future.done():
                future.cancel()
        return None if future.cancelled() else future.result()


LIMIT = 3


@dataclass
class RefusalLimit:
    """Counts refusals of one kind in a row; ``clear`` after a committed step."""

    worker_id: str
    _kind: tuple[int, str] = (0, "")
    _count: int = 0

    def add(self, incarnation: int, refusal: RequestRefused) -> None:
        """Raises UserError at the third of the same kind."""
        kind = (incarnation, refusal.code)
        self._count = self._count + 1 if kind == self._kind else 1
        self._kind = kind
        if self._count >= LIMIT:
            raise UserError(
                f"the controller refused {self.worker_id} {LIMIT} times in a row: {refusal}"
            ) from refusal

    def clear(self) -> None:
        self._count = 0


@dataclass(slots=True)
class EpochState:
    """Mesh epochs of this replica; 0: none."""

    wanted: int = 0
    """Newest epoch that a directive has named. Written by the session's thread."""
    formed: int = 0
    """The epoch whose mesh this replica is in, with the state that all members hold."""
    ended: int = 0
    """Newest epoch that ended for this replica before the controller named another one."""


class PolicyReport:
    """Written on the training thread, read on any: each change replaces ``now``."""

    def __init__(self) -> None:
        self.epochs = EpochState()
        self.state: TrainState | None = None
        self.now: dict[str, Any] = {
            "lifecycle": worker_pb2.LIFECYCLE_STARTING,
            "progress": 0,
            "busy": True,
            "activity": "loading the model",
            "state_version": NO_VERSION,
        }
        self.gauges: dict[str, float] = {}
        """Seconds that the newest park and unpark took."""
        self._resources = Resources()

    def work(self, activity: str) -> None:
        """The thread has something to do: a worker that is busy without progress is wedged."""
        self.progressed(busy=True, activity=activity)

    def rest(self, activity: str) -> None:
        self.progressed(busy=False, activity=activity)

    def progressed(self, **changes: Any) -> None:
        """A part of the work is done."""
        self.change(progress=self.now["progress"] + 1, **changes)

    def change(self, **changes: Any) -> None:
        """Takes over the state's version and the epoch, too."""
        version = NO_VERSION if self.state is None else self.state.version
        place = {"mesh_epoch": self.epochs.formed, "state_version": version}
        self.now = self.now | place | changes

    def report(self, links: list[int], waits: Sequence[Any] = ()) -> worker_pb2.Report:
        gauges = self._resources.read() | self.gauges
        return worker_pb2.Report(**self.now, link_epochs=links, gauges=gauges, waits=waits)


class StuckRanks:
    """Ranks of a replica that the kernel does not run: stopped, or in an uninterruptible wait. Rank
    0 waits for them in a collective, and its reports go on. So it alone can say whose fault the
    wait is. Asked for each report: one read of /proc for each rank of this host."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._since: dict[int, float] = {}

    def waits(self, least_s: float = LEAST_AGE_S) -> list[Wait]:
        """One for each rank that was found so at every question for at least ``least_s``."""
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
