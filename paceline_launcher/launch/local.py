"""Processes of a run on this machine, reconciled with the desired numbers of the ledger.

    spawn ──► running ──► ended ──► reported to the controller ──► restart decision ──► spawn again
                ▲                                                   │
    reconcile ──┘ (more workers desired)                            └──► gone, or the run fails

- One task owns each name: it alone starts, awaits and restarts the processes of that name.
- Every process is in the fleet record before anything else happens to it.
- The ledger decides how many workers there are; this module only starts and drains them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from paceline.config.schema import Config
from paceline.observe.event_follower import leader_status
from paceline.observe.fleet_file import FleetRecord, ProcessId, ProcessRecord
from paceline.providers.base import desired_of
from paceline.redis.leader_lease import release_dead
from paceline.rpc.client import ControlPlane, ControlPlaneUnavailable, RequestRefused
from paceline.v1 import admin_pb2
from paceline.worker_pools import desired_workers, in_order, worker_index
from paceline_launcher.launch.child import UNSEEN, Adopted, Child, ChildSpec, end_all
from paceline_launcher.launch.fault_reports import FaultReports
from paceline_launcher.launch.launch import Launcher
from paceline_launcher.launch.restarts import GiveUp, Leave, Restart, RestartPolicy
from paceline_launcher.machine_gpus import MachineGpus, shown

REPORT_LIMIT_S = 10.0
WHY_LIMIT_S = 5.0
"""Time for a controller to answer why a worker has ended by itself."""
FAREWELL_LIMIT_S = 2.0
"""Time to report to a controller how the workers of a stopping run have ended."""
CONTROLLER = "controller"
"""Role of a process that is no worker. The role of a worker is its pool."""


@dataclass(eq=False)
class LocalFleet:
    """``failed`` gets one line as its result when the fleet cannot go on."""

    config: Config
    launcher: Launcher
    run_dir: Path
    control: ControlPlane
    note: Callable[[str], None]
    earlier: FleetRecord | None = None
    """Record of a fleet whose supervisor is gone, for ``adopt_all``."""
    gpus: MachineGpus | None = None
    """To be given out to workers. None: all see the same."""

    def __post_init__(self) -> None:
        config = self.config
        self._restarts = RestartPolicy(
            enabled=config.fleet.restart, max_restarts=config.fleet.max_restarts
        )
        self._children: dict[str, Child] = {}
        self._tends: dict[str, asyncio.Task[None]] = {}
        self._roles: dict[str, str] = {}
        self._leaving: set[str] = set()
        self._abandoned: Counter[str] = Counter()
        self._left: set[str] = set()
        """Names of those that are not started again."""
        self._crowded: set[str] = set()
        """Names of those that wait for a GPU."""
        self._background: set[asyncio.Task[object]] = set()
        self.faults = FaultReports(self.control)
        self._ending = asyncio.Event()
        self._killed = False
        """Controllers were killed as well, so that nothing can be reported any more."""
        self.redis_url = ""
        self.finished = False
        """The run is over: a worker that exits with status 0 is done."""
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.record = FleetRecord(config.run.name, ProcessId.of(os.getpid()))
        if self.earlier is not None:
            self.record.processes, self.record.redis = self.earlier.processes, self.earlier.redis
        self.record.write(self.run_dir)

    def start_all(self) -> None:
        """Controllers and workers at once: workers wait for a leader by themselves."""
        for index in range(self.config.fleet.controllers):
            self._tend_new(self.launcher.controller(index))
        for pool, count in desired_workers(self.config).items():
            for index in range(count):
                if (spec := self._worker(pool, index)) is not None:
                    self._tend_new(spec)

    def adopt_all(self) -> int:
        """Takes over the living processes of the earlier fleet and starts missing controllers.

        ``reconcile`` starts missing workers once the ledger says how many are desired, which is
        none if the run has ended meanwhile. Returns the number of processes taken over.
        """
        living = {p.name: i for p in self.record.processes for i in p.ids if i.alive()}
        if self.gpus is not None:
            for name in living:
                self.gpus.keep(name, _environment_of(living[name]))
        specs = [self.launcher.controller(i) for i in range(self.config.fleet.controllers)]
        for process in self.record.processes:
            if process.role != CONTROLLER and process.name in living:
                specs.append(self._adopted(process, living))
            elif process.role != CONTROLLER and process.state != "ended":
                self._mark(process, "ended")
        for spec in specs:
            identity = living.get(spec.name)
            self._tend_new(spec, Adopted(spec, identity) if identity else None)
        return sum(spec.name in living for spec in specs)

    async def reconcile(self, status: admin_pb2.StatusReply) -> None:
        """Starts or drains workers until their number is the desired one."""
        if self._ending.is_set() or status.phase not in ("waiting", "running", "paused"):
            return
        self._note_leaving(status)
        for pool in in_order(status.desired):
            staying = [n for n, r in self._roles.items() if r == pool and n not in self._leaving]
            desired = desired_of(status, pool) - self._abandoned[pool]
            for _ in range(desired - len(staying)):
                index = self._next_index(pool)
                if (spec := self._worker(pool, index)) is None:
                    break
                self.note(f"starting {spec.name}")
                self._tend_new(spec)
            surplus = len(staying) - desired
            for name in sorted(staying, key=worker_index, reverse=True)[: max(0, surplus)]:
                await self._drain(name)

    def _adopted(self, process: ProcessRecord, living: Collection[str]) -> ChildSpec:
        """With the GPUs that it keeps over a restart; all, if an earlier supervisor gave it none."""
        spec = self.launcher.worker(process.role, worker_index(process.name))
        own = self.gpus.take(spec.name, living) if self.gpus is not None else None
        return _seeing(spec, own or ())

    def _worker(self, pool: str, index: int) -> ChildSpec | None:
        """With GPUs of its own; None if too few are free."""
        spec = self.launcher.worker(pool, index)
        if self.gpus is None:
            return spec
        own = self.gpus.take(spec.name, self._roles)
        if own is not None:
            self._crowded.discard(spec.name)
            return _seeing(spec, own)
        if spec.name not in self._crowded:  # it is asked for again and again
            self._crowded.add(spec.name)
            self.note(f"{spec.name} waits for a free GPU: scale down or drain another worker")
        return None

    def _note_leaving(self, status: admin_pb2.StatusReply) -> None:
        for worker in status.workers:
            child = self._children.get(worker.worker_id)
            # The pid: the ledger may still show the previous process of that name.
            if _is_leaving(worker) and child is not None and child.pid == worker.pid:
                self._leaving.add(worker.worker_id)

    async def wait_workers(self, names: Collection[str], limit_s: float) -> None:
        """Waits until these workers have ended by themselves, at most ``limit_s`` seconds."""
        tends = [t for name, t in self._tends.items() if name in names and name in self._roles]
        if tends:
            await asyncio.wait(tends, timeout=limit_s)

    def begin_end(self) -> None:
        """Nothing is started any more."""
        self._ending.set()

    async def stop_workers(self, patience_s: float) -> None:
        """Reports to the ledger how they ended: a continued run must find none of them alive."""
        self._ending.set()
        running = self._running(workers=True)
        tends = [self._tends[child.spec.name] for child in running]
        await end_all(running, patience_s)
        if tends:
            await asyncio.wait(tends, timeout=FAREWELL_LIMIT_S)
        if self._background:
            await asyncio.wait(self._background, timeout=FAREWELL_LIMIT_S)

    async def stop_controllers(self, patience_s: float) -> None:
        self._ending.set()
        await end_all(self._running(workers=False), patience_s)

    async def close(self) -> None:
        """Ends every process of the fleet and every task of this object."""
        self._ending.set()
        self.kill_all()
        tasks = [*self._tends.values(), *self._background]
        if tasks:
            await asyncio.wait(tasks, timeout=10.0)
        await self.faults.close()
        self.record.write(self.run_dir)

    def kill_all(self) -> None:
        """SIGKILL to exactly the sessions this fleet started."""
        self._ending.set()
        self._killed = True
        for task in self._background:
            task.cancel()
        for child in (*self._running(workers=False), *self._running(workers=True)):
            child.kill()

    def _running(self, *, workers: bool) -> list[Child]:
        """Those of the workers, or else of the controllers."""
        there = (c for c in self._children.values() if c.running)
        return [c for c in there if (c.spec.role != CONTROLLER) == workers]

    def _tend_new(self, spec: ChildSpec, first: Child | None = None) -> None:
        """``first``: the process of that name that already runs."""
        self._roles[spec.name] = spec.role
        self._leaving.discard(spec.name)
        if first is not None:
            self._children[spec.name] = first
        self._tends[spec.name] = asyncio.create_task(
            self._tend(spec, first), name=f"tend {spec.name}"
        )

    async def _tend(self, spec: ChildSpec, first: Child | None) -> None:
        record = self._record_of(spec)
        try:
            while not self._ending.is_set():
                child, first = first, None
                if child is None:
                    ready = await self._ready(spec)
                    if ready is None:
                        return
                    child = await Child.start(ready)
                self._children[spec.name] = child
                # The drain was meant for the previous process.
                self._leaving.discard(spec.name)
                if child.identity not in record.ids:
                    record.ids.append(child.identity)
                self._mark(record, "running")
                if self._ending.is_set():
                    child.kill()
                code = await self.faults.await_end(child)
                record.exit_code = None if code == UNSEEN else code
                self._mark(record, "ended")
                if self._ending.is_set():
                    if spec.role != CONTROLLER and code != 0 and not self._killed:
                        self._report_exit(spec, child, code)
                    return
                if await self._is_done(spec, child, code):
                    return
                self._report_exit(spec, child, code)
                if not await self._again(spec, child, code, record):
                    return
                record.restarts += 1
        except OSError as error:
            self._fail(f"{spec.name} cannot be started: {error}")
        finally:
            if self._children.get(spec.name) is None or not self._children[spec.name].running:
                self._roles.pop(spec.name, None)
                self._leaving.discard(spec.name)

    async def _ready(self, spec: ChildSpec) -> ChildSpec | None:
        """``spec`` as a process is started by it now; None: no process is to be started any more."""
        return spec

    async def _is_done(self, spec: ChildSpec, child: Child, code: int) -> bool:
        """True if the worker has left for good: the run has ended, or it was drained."""
        if spec.role == CONTROLLER:
            return False
        if code != 0 and spec.name in self._leaving:
            # Killed while it was draining: it may not have deregistered, and is not restarted.
            self._report_exit(spec, child, code)
            self.note(f"{spec.name} ended while it was leaving")
            return True
        if code not in (0, UNSEEN):
            return False
        if not self.finished and spec.name not in self._leaving:
            # Our status is one poll old; the worker may know more.
            await self._ask_why(spec.name, child.pid)
        if self.finished:
            return True
        if spec.name in self._leaving:
            self.note(f"{spec.name} has left")
            return True
        return False

    async def _ask_why(self, name: str, pid: int) -> None:
        try:
            status = await leader_status(self.control, WHY_LIMIT_S)
        except (ControlPlaneUnavailable, RequestRefused):
            return
        if status.phase == "finished":
            self.finished = True
        for worker in status.workers:
            if worker.worker_id == name and worker.pid == pid and _is_leaving(worker):
                self._leaving.add(name)

    async def _again(self, spec: ChildSpec, child: Child, code: int, record: ProcessRecord) -> bool:
        now = time.monotonic()
        counted = self._counted(spec, code)
        verdict = self._restarts.decide(spec.name, counted, now - child.began, now)
        how = f"exit status {code}" if code >= 0 else f"signal {-code}"
        if code == UNSEEN:
            how = "exit status unknown"
        match verdict:
            case GiveUp(reason):
                last = child.last_line()
                if code == 2 and last:
                    self._fail(f"{spec.name}: {last}")
                else:
                    said = f". Its last line: {last}" if last and code > 0 else ""
                    self._fail(f"{spec.name} ended ({how}) and {reason}{said} (see {spec.log})")
                return False
            case Leave():
                self.note(f"{spec.name} ended ({how}); fleet.restart is off")
                self._abandoned[spec.role] += 1
                self._left.add(spec.name)
                if not self._others_of(spec):
                    self._fail(f"the last {spec.role} process, {spec.name}, ended ({how})")
                return False
            case Restart(delay_s):
                when = f"in {delay_s:g} s" if delay_s else "now"
                self.note(f"{spec.name} ended ({how}); starting it again {when}")
                self._mark(record, "waiting")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay_s or 0.001):
                        await self._ending.wait()
                return True

    def _counted(self, spec: ChildSpec, code: int) -> int:
        """The exit status as which an end counts."""
        return code

    def _others_of(self, spec: ChildSpec) -> list[str]:
        """Workers that do the same as this one."""
        return [n for n, r in self._roles.items() if r == spec.role and n != spec.name]

    def _report_exit(self, spec: ChildSpec, child: Child, code: int) -> None:
        work: Coroutine[Any, Any, object]
        if spec.role == CONTROLLER:
            work = self._bury_controller(child, code)
        else:
            work = self.faults.report_exit(child, code)
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _bury_controller(self, child: Child, code: int) -> None:
        run, name = self.config.run.name, child.spec.name
        await asyncio.to_thread(release_dead, self.redis_url, run, name, child.pid)
        await self.faults.report_end(child, code)

    async def _drain(self, name: str, worker_id: str = "") -> None:
        """``worker_id``: of the worker that the process belongs to, if it has another name."""
        child = self._children.get(name)
        if child is None:
            return
        # replace: the desired number is lower already.
        request = admin_pb2.DrainRequest(
            request_id=f"surplus-{name}-{child.pid}", worker_id=worker_id or name, replace=True
        )
        try:
            reply = await self.control.call("AdminService.Drain", request, timeout_s=REPORT_LIMIT_S)
        except (ControlPlaneUnavailable, RequestRefused) as error:
            self.note(f"{name} could not be drained: {error}")
            return
        if not reply.accepted:
            # It has not registered yet, because its model is still loading. The next poll repeats
            # the request.
            return
        self._leaving.add(name)
        self.note(f"{name} is asked to leave")

    def _next_index(self, pool: str) -> int:
        taken = {worker_index(name) for name, r in self._roles.items() if r == pool}
        return next(index for index in range(len(taken) + 1) if index not in taken)

    def _record_of(self, spec: ChildSpec) -> ProcessRecord:
        for record in self.record.processes:
            if record.name == spec.name:
                return record
        record = ProcessRecord(spec.name, spec.role, str(spec.log), spec.address)
        self.record.processes.append(record)
        return record

    def _mark(self, record: ProcessRecord, state: str) -> None:
        record.state = state
        self.record.write(self.run_dir)

    def _fail(self, reason: str) -> None:
        if not self.failed.done():
            self.failed.set_result(reason)


def _is_leaving(worker: admin_pb2.WorkerStatus) -> bool:
    return worker.state in ("draining", "stopped")


def _seeing(spec: ChildSpec, gpus: Sequence[str]) -> ChildSpec:
    return replace(spec, environment={**spec.environment, **shown(gpus)})


def _environment_of(process: ProcessId) -> Mapping[str, str]:
    try:
        found: dict[str, str] = psutil.Process(process.pid).environ()
    except psutil.Error:
        return {}  # it has just ended
    return found
