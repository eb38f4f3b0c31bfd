"""One name of the fleet: its process, restarted as often as that is right.

                    ┌───────── restart ──────────┐
                    ▼                            │
    ENDED ──► STARTING ──► RUNNING ──► ended? ──► WAITING ──► ENDED: the run is over
      ▲ ▲                     │
      │ │                     ▼ drained
      │ └──── NO_GPU       LEAVING
      └───────────────────────┘

- One task owns the name: it alone starts, awaits and restarts its processes.
- Every process is in the fleet record before anything else happens to it.
"""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING

from paceline.errors import in_words
from paceline.observe.fleet_file import ProcessRecord
from paceline.observe.run_watcher import leader_status
from paceline.process.kernel_state import kernel_state
from paceline.process.lifetime import TRY_AGAIN
from paceline.providers.base import GONE_OR_LEAVING
from paceline.redis.leader_lease import release_dead
from paceline.rpc.client import ControlPlaneUnavailable, RequestRefused
from paceline.v1 import admin_pb2
from paceline_launcher.launch.child import CONTROLLER, UNSEEN, Child, ChildSpec, how_ended
from paceline_launcher.launch.node_workers import RANK, replica_of
from paceline_launcher.launch.passing import check_room, is_set_within
from paceline_launcher.launch.restarts import BAD_INPUT, GiveUp

if TYPE_CHECKING:
    from paceline_launcher.launch.fleet import Fleet

REPORT_LIMIT_S = 10.0
WHY_LIMIT_S = 5.0  # time for a controller to answer why a worker has ended by itself
POLL_S = 0.5
IDS_KEPT = 50


class State(Enum):
    ENDED = "ended"  # nothing runs under this name, and nothing is about to
    NO_GPU = "no_gpu"  # wanted, but too few GPUs are free
    STARTING = "starting"  # its process is being started, or its ranks' meeting point is awaited
    RUNNING = "running"  # its process runs
    LEAVING = "leaving"  # its process runs and was asked to leave: its end is no failure
    WAITING = "waiting"  # its process has ended; the restart policy has or will start it again


ACTIVE = (State.STARTING, State.RUNNING, State.LEAVING, State.WAITING)
NEXT = {
    State.ENDED: {State.NO_GPU, State.STARTING},
    State.NO_GPU: {State.STARTING},
    State.STARTING: {State.RUNNING, State.ENDED},
    State.RUNNING: {State.LEAVING, State.WAITING, State.ENDED},
    State.LEAVING: {State.ENDED},
    State.WAITING: {State.STARTING, State.ENDED},
}


class FleetProcess:
    """``role``: controller, rank, or the pool of a worker."""

    def __init__(self, fleet: Fleet, name: str, role: str) -> None:
        self.name, self.role = name, role
        self.state = State.ENDED
        self.child: Child | None = None  # the newest process of this name
        self.task: asyncio.Task[None] | None = None
        self._fleet = fleet

    @property
    def active(self) -> bool:
        """A process of this name runs, or is about to."""
        return self.state in ACTIVE

    @property
    def staying(self) -> bool:
        return self.active and self.state is not State.LEAVING

    @property
    def worker_id(self) -> str:
        """Name under which the ledger knows it: a rank is known by its replica."""
        return replica_of(self.name) if self.role == RANK else self.name

    def move(self, state: State) -> None:
        assert state in NEXT[self.state], f"{self.name}: {self.state} -> {state}"
        self.state = state

    def start(self, spec: ChildSpec, first: Child | None = None) -> None:
        """``first``: the process of that name that already runs."""
        self.move(State.STARTING)
        if first is not None:
            self.child = first
            self._fleet.restarts.stands(self.name)
        self.task = asyncio.create_task(self._tend(spec, first), name=f"tend {self.name}")

    def note(self, worker: admin_pb2.WorkerStatus, passed_s: float) -> None:
        """Takes in what the ledger says of it, or of an earlier process of its name, ``passed_s``
        after the last time. One that is dead for the ledger registers again, unless it hangs: then
        another one takes its place."""
        if is_leaving(worker):
            self.note_leaving(worker.pid)
        child, limit_s = self.child, self._fleet.config.fleet.wedged_after_s
        if child is None or child.pid != worker.pid:
            return
        if worker.state != "dead" or self.state is not State.RUNNING:
            child.lost_s = 0.0
            return
        child.lost_s += passed_s
        state = kernel_state(child.pid)
        # Who has stopped it may want to continue it.
        if child.lost_s >= limit_s and state is not None and not state.stopped:
            self._fleet.note(
                f"{self.name} hangs: it has not come back for {limit_s:g} s, and is killed"
            )
            child.kill()

    def lived_s(self, now: float) -> float:
        """Seconds since its process began. A worker that has never been at work has not lived: it
        may need minutes to load before it fails in the same way each time."""
        child = self.child
        if child is None or not (child.worked or self.role in (CONTROLLER, RANK)):
            return 0.0
        return now - child.began

    def note_leaving(self, pid: int) -> None:
        """The ledger says that process ``pid`` leaves; it may be an earlier one of this name."""
        if self.state is State.RUNNING and self.child is not None and self.child.pid == pid:
            self.move(State.LEAVING)

    async def drain(self) -> None:
        """Asks the ledger to let the process go. The desired number of workers stays the same."""
        child, fleet = self.child, self._fleet
        if self.state is not State.RUNNING or child is None:
            return
        request = admin_pb2.DrainRequest(
            request_id=f"surplus-{self.name}-{child.pid}", worker_id=self.worker_id, replace=True
        )
        try:
            await fleet.control.call("AdminService.Drain", request, timeout_s=REPORT_LIMIT_S)
        except RequestRefused:
            # A worker whose model is still loading has not registered: the next poll repeats it.
            return
        except ControlPlaneUnavailable as error:
            fleet.note(f"{self.name} could not be drained: {error}")
            return
        if self.child is child:  # another process than that one may run by now
            self.note_leaving(child.pid)
            fleet.note(f"{self.name} is asked to leave")

    async def _tend(self, spec: ChildSpec, first: Child | None) -> None:
        fleet, record = self._fleet, self._fleet.record_of(spec)
        try:
            while not fleet.ending.is_set():
                child, first = first or await self._started(spec), None
                if child is None:
                    return
                self.child = child
                self.move(State.RUNNING)
                if child.identity not in record.ids:
                    record.ids.append(child.identity)
                    del record.ids[:-IDS_KEPT]
                fleet.mark(record, "running")
                if fleet.ending.is_set():
                    child.kill()
                code = await fleet.faults.await_end(child)
                record.exit_code = None if code == UNSEEN else code
                fleet.mark(record, "ended")
                if fleet.ending.is_set():
                    if self.role != CONTROLLER and code != 0 and not fleet.killed:
                        self._report(child, code)
                    return
                if await self._has_left(child, code):
                    return
                self.move(State.WAITING)
                self._report(child, code)
                if not await self._waits_for_restart(child, code, record):
                    return
                record.restarts += 1
                self.move(State.STARTING)
        except OSError as error:
            fleet.fail(f"{self.name} cannot be started: {in_words(error, spec.log)}")
        finally:
            self.move(State.ENDED)

    async def _started(self, spec: ChildSpec) -> Child | None:
        """A new process; None if the fleet ends, or this node leaves, before its ranks can meet."""
        fleet = self._fleet

        async def start() -> Child | None:
            variables = await fleet.rank_variables(self)
            if variables is None:
                return None
            # Without room it would end at once, and that would count as its failure.
            await asyncio.to_thread(check_room, fleet.specs.run_dir)
            return await Child.start(replace(spec, environment={**spec.environment, **variables}))

        while True:
            child = await fleet.passing.done(
                f"{self.name} cannot be started", start, fleet.specs.run_dir
            )
            if child is not None or fleet.going or await is_set_within(POLL_S, fleet.ending):
                return child

    async def _has_left(self, child: Child, code: int) -> bool:
        """True if it has left for good: the run has ended, or it was drained."""
        fleet, ended_well = self._fleet, code in (0, UNSEEN)
        if self.role == CONTROLLER:
            return False
        if self.state is State.LEAVING and code != 0 and self.role != RANK:
            # Killed while it was draining: it may not have deregistered, and is not restarted.
            self._report(child, code)
            fleet.note(f"{self.name} ended while it was leaving")
            return True
        if ended_well and self.state is State.RUNNING and not fleet.finished:
            # Our status is one poll old; the worker may know more.
            await self._ask_why(child)
        if fleet.finished and (ended_well or self.role == RANK):
            return True
        if self.state is State.LEAVING and self.role != RANK:
            fleet.note(f"{self.name} has left")
        return self.state is State.LEAVING

    async def _ask_why(self, child: Child) -> None:
        """Asks the ledger whether the run is finished, or this worker was asked to leave."""
        fleet = self._fleet
        try:
            status = await leader_status(fleet.control, WHY_LIMIT_S)
        except (ControlPlaneUnavailable, RequestRefused):
            return
        fleet.finished |= status.phase == "finished"
        for worker in status.workers:
            if worker.worker_id != self.worker_id:
                continue
            # A rank that ends with 0 has followed its rank 0, whose process id is another.
            follows = self.role == RANK and worker.state in GONE_OR_LEAVING
            if follows or is_leaving(worker):
                self.note_leaving(child.pid if follows else worker.pid)

    async def _waits_for_restart(self, child: Child, code: int, record: ProcessRecord) -> bool:
        """True once it is time for a restart; False if there is none."""
        fleet, now = self._fleet, time.monotonic()
        # A rank ends with 1 as soon as another one has ended: failures of the replica are counted
        # at rank 0.
        counted = -signal.SIGKILL if self.role == RANK and code == 1 else code
        how = how_ended(code)
        # That a rank follows its rank 0 says nothing of it.
        spare = (self.role == RANK and code == 1) or fleet.spares(self)
        lived_s = self.lived_s(now)
        try:
            delay_s = fleet.restarts.delay_s(self.name, counted, lived_s, now, spare=spare)
        except GiveUp as why:
            last = child.last_line()
            if code == BAD_INPUT and last:
                fleet.fail(f"{self.name}: {last}")
            else:
                line = f". Its last line: {last}" if last and code > 0 else ""
                fleet.fail(f"{self.name} ended ({how}) and {why}{line} (see {child.spec.log})")
            return False
        if code == TRY_AGAIN:
            how = f"what it met can pass: {child.last_line()}"
        when = f"in {delay_s:g} s" if delay_s else "now"
        fleet.note(f"{self.name} ended ({how}); starting it again {when}")
        fleet.mark(record, "waiting")
        return not await is_set_within(delay_s, fleet.ending)

    def _report(self, child: Child, code: int) -> None:
        """Reports the end to the controllers, without waiting for them."""
        faults = self._fleet.faults
        if self.role == CONTROLLER:
            faults.send(self._bury_controller(child, code))
        elif self.role != RANK:
            faults.send(faults.report_exit(child, code))
        elif code < 0 and not child.signalled:
            # Something has killed the rank: the end of its replica, which the ledger knows,
            # follows from it.
            faults.send(faults.report_end(child, code))

    async def _bury_controller(self, child: Child, code: int) -> None:
        fleet = self._fleet
        run = fleet.config.run.name
        await asyncio.to_thread(release_dead, fleet.redis_url, run, self.name, child.pid)
        await fleet.faults.report_end(child, code)


def is_leaving(worker: admin_pb2.WorkerStatus) -> bool:
    return worker.state in ("draining", "stopped")
