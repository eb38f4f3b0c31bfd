"""Processes of a run on one node, reconciled with the desired numbers of the ledger.

    status of the ledger ──► wanted names ──► missing ones start, surplus ones are asked to leave

The ledger decides how many workers there are. On a node that is not the only one, the wanted names
are those of all nodes; this one starts those that are placed on it. Of a wanted replica that is on
several nodes each starts its own ranks, and starts them again as often as the replica is.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from paceline.config.schema import Config
from paceline.errors import can_pass, in_words
from paceline.memory_plan import SHARES_GPU
from paceline.observe.fleet_file import FILE, FleetRecord, ProcessId, ProcessRecord
from paceline.observe.run_watcher import leader_status
from paceline.providers.base import AT_WORK
from paceline.rpc.client import ControlPlane, ControlPlaneUnavailable, RequestRefused
from paceline.v1 import admin_pb2
from paceline.v1.common_pb2 import ROLE_ROLLOUT
from paceline.worker_pools import POLICY, in_order, pool_of_worker, worker_index
from paceline_launcher.launch.child import (
    CONTROLLER,
    Child,
    ChildSpec,
    ChildSpecs,
    end_all,
)
from paceline_launcher.launch.fault_reports import FaultReports
from paceline_launcher.launch.fleet_process import FleetProcess, State
from paceline_launcher.launch.node_workers import (
    RANK,
    MeetingPoint,
    NodeWorkers,
    point_in,
    publish_point,
    rank_environment,
    rank_of,
    read_point,
    replica_of,
)
from paceline_launcher.launch.passing import Passing
from paceline_launcher.launch.restarts import CALM_S, RestartPolicy
from paceline_launcher.node_placement import shown

POLL_S = 0.5
ASK_LIMIT_S = 2.0
FAREWELL_LIMIT_S = 2.0
"""Time to report to a controller how the workers of a stopping run have ended."""
GONE = ("stopped", "dead")
USEFUL = ("running", "spare")
ABSENCE_S = 5.0
"""Longest time between two statuses that counts in full."""


@dataclass(eq=False)
class Fleet:
    """``failed`` gets one line as its result when the fleet cannot go on."""

    config: Config
    specs: ChildSpecs
    record_dir: Path  # directory of the fleet record: the run's, or a node's own
    control: ControlPlane
    note: Callable[[str], None]
    workers: NodeWorkers
    address: str = "127.0.0.1"  # address of this node, under which other nodes reach its ranks
    earlier: FleetRecord | None = None  # record of a fleet whose launcher is gone, for `adopt_all`

    def __post_init__(self) -> None:
        self.restarts = RestartPolicy(self.config.fleet.max_restarts)
        self.processes: dict[str, FleetProcess] = {}
        self.faults = FaultReports(self.control)
        self.ending = asyncio.Event()  # nothing is started any more
        self.passing = Passing(self.note, self.ending)
        self._writing: asyncio.Task[None] | None = None
        self.going = False
        """This node leaves the run, which goes on: nothing is started any more here."""
        self.killed = False
        """Controllers were killed as well, so that nothing can be reported any more."""
        self.at_work: dict[tuple[str, int], float] = {}
        """Since when each worker (name, process id) has been seen at work without a break."""
        self.noted_at = time.monotonic()  # When the ledger last said how the workers are
        self.finished = False  # the run is over: a worker that exits with status 0 is done
        self.redis_url = ""
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.record = FleetRecord(self.config.run.name, ProcessId.of(os.getpid()))
        if self.earlier is not None:
            self.record.processes, self.record.redis = self.earlier.processes, self.earlier.redis
        self.write_record()

    def start_controllers(self) -> None:
        for index in range(self.config.fleet.controllers):
            spec = self.specs.controller(index)
            self._process(spec).start(spec)

    def start_workers(self) -> None:
        for name in self.workers.first():
            self._start_worker(name)

    def adopt_all(self) -> int:
        """Takes over the living processes of the earlier fleet and starts missing controllers.
        ``reconcile`` starts missing workers once the ledger says how many are desired, which is
        none if the run has ended meanwhile. Returns the number of processes taken over."""
        living = {p.name: i for p in self.record.processes for i in p.ids if i.alive()}
        if (machine := self.workers.machine) is not None:
            for name, identity in living.items():
                with contextlib.suppress(psutil.Error):  # it has just ended
                    machine.keep(name, psutil.Process(identity.pid).environ())
        specs = [self.specs.controller(i) for i in range(self.config.fleet.controllers)]
        for process in self.record.processes:
            if process.role == CONTROLLER:
                continue
            if process.name in living:
                spec = self.specs.worker(process.role, worker_index(process.name))
                # All GPUs, if an earlier launcher gave it none of its own.
                specs.append(self._seeing(spec, self.workers.take(spec.name, living) or ()))
            elif process.state != "ended":
                self.mark(process, "ended")
        for spec in specs:
            adopted = Child(spec, living[spec.name]) if spec.name in living else None
            self._process(spec).start(spec, adopted)
        return sum(spec.name in living for spec in specs)

    async def reconcile(self, status: admin_pb2.StatusReply) -> None:
        """Starts and drains this node's workers until they are the wanted ones."""
        self._note(status.workers)
        if self.ending.is_set() or self.going or status.phase not in AT_WORK:
            return
        for pool in in_order(status.desired):
            here = [process for process in self._active() if process.role == pool]
            staying = {process.name for process in here if process.staying}
            wanted = self.workers.wanted(status, pool, staying, [p.name for p in here])
            for name in sorted(wanted, key=worker_index):
                if self.workers.is_here(name):
                    self._start_missing(name)
            for name in sorted(staying - wanted, key=worker_index, reverse=True):
                await self.processes[name].drain()
            if pool == POLICY:
                self._reconcile_ranks(status, wanted)

    def _note(self, workers: Iterable[admin_pb2.WorkerStatus]) -> None:
        """Takes in which workers leave and which are at work: on this node and on others."""
        before, now = self.at_work, time.monotonic()
        # Without controllers nobody can register: that time is held against no worker.
        passed_s, self.noted_at = min(now - self.noted_at, ABSENCE_S), now
        self.at_work = {}
        for worker in workers:
            process = self.processes.get(worker.worker_id)
            if process is not None:
                process.note(worker, passed_s)
            waits = worker.role == ROLE_ROLLOUT and worker.version < 0 and not self.config.recorded
            if worker.state not in USEFUL or waits:
                continue
            key = worker.worker_id, worker.pid
            self.at_work[key] = before.get(key, now)
            if process is not None and process.child and process.child.pid == worker.pid:
                process.child.worked = True

    def spares(self, process: FleetProcess) -> bool:
        """True if another of its kind has done well for a while: the run goes on without it."""
        now = time.monotonic()
        if process.role == CONTROLLER:
            # A stranger may have its port.
            here = [p for p in self.processes.values() if p.state is State.RUNNING and p.child]
            began = [p.child.identity.started for p in here if p.child and p.role == CONTROLLER]
            return any(time.time() - at > CALM_S for at in began)
        calm = (name for (name, _), since in self.at_work.items() if now - since > CALM_S)
        return any(pool_of_worker(n) == process.role and n != process.name for n in calm)

    def _reconcile_ranks(self, status: admin_pb2.StatusReply, replicas: Collection[str]) -> None:
        """Starts the ranks of wanted replicas, and ends those whose replica is gone or
        elsewhere."""
        ranks = self.workers.ranks(replicas)
        for name in ranks:
            self._start_missing(name)
        states = {worker.worker_id: worker.state for worker in status.workers}
        for process in [p for p in self._active() if p.role == RANK]:
            child, replica = process.child, replica_of(process.name)
            if child is None or not child.running:
                continue
            if process.name not in ranks and states.get(replica, "dead") in GONE:
                process.note_leaving(child.pid)
                child.terminate()
            point = read_point(self.specs.run_dir, replica)
            if point is not None and point != point_in(child.spec.environment):
                child.terminate()  # rank 0 is at another place by now: it would wait in vain

    async def rank_variables(self, process: FleetProcess) -> Mapping[str, str] | None:
        """Variables of a rank of a replica on several nodes, {} for any other process. None: it is
        not known yet where the ranks meet."""
        place = self.workers.place_of(process.name) if process.role in (POLICY, RANK) else None
        if place is None or not place.rest:
            return {}
        run_dir, rank = self.specs.run_dir, rank_of(process.name)
        replica = replica_of(process.name)
        point: MeetingPoint | None
        if rank == 0:
            point = await asyncio.to_thread(publish_point, run_dir, replica, self.address)
        else:
            point = await asyncio.to_thread(read_point, run_dir, replica)
        return rank_environment(place, self.workers.node, rank, point) if point else None

    async def wait_workers(self, names: Collection[str], limit_s: float) -> None:
        """Waits until these workers have ended by themselves, at most ``limit_s`` seconds. Workers
        on other nodes count: they may be writing the last checkpoint."""
        deadline = time.monotonic() + limit_s
        tasks = [p.task for p in self._active() if p.name in names and p.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=limit_s)
        elsewhere = {name for name in names if name not in self.processes}
        while self.workers.placement is not None and elsewhere and time.monotonic() < deadline:
            try:
                status = await leader_status(self.control, ASK_LIMIT_S)
            except (ControlPlaneUnavailable, RequestRefused):
                continue  # the call itself has waited
            if not any(w.worker_id in elsewhere and w.state not in GONE for w in status.workers):
                return
            await asyncio.sleep(POLL_S)

    async def leave(self) -> None:
        """Asks the ledger to let this node's workers go, without desiring fewer of them."""
        self.going = True
        for name in self.worker_names():
            await self.processes[name].drain()

    def worker_names(self) -> list[str]:
        return [process.name for process in self._active() if process.role != CONTROLLER]

    def running(self, *, workers: bool) -> list[Child]:
        """Running processes of workers, or else of controllers."""
        processes = (p for p in self.processes.values() if (p.role != CONTROLLER) == workers)
        return [p.child for p in processes if p.child is not None and p.child.running]

    async def stop_workers(self, patience_s: float) -> None:
        """Reports to the ledger how they ended: a continued run must find none of them alive."""
        self.ending.set()
        children = self.running(workers=True)
        names = {child.spec.name for child in children}
        tasks = [p.task for p in self.processes.values() if p.name in names and p.task]
        await end_all(children, patience_s)
        if tasks:
            await asyncio.wait(tasks, timeout=FAREWELL_LIMIT_S)
        await self.faults.settle(FAREWELL_LIMIT_S)

    async def stop_controllers(self, patience_s: float) -> None:
        self.ending.set()
        await end_all(self.running(workers=False), patience_s)

    async def close(self) -> None:
        """Ends every process of the fleet and every task of this object."""
        self.kill_all()
        tasks = [p.task for p in self.processes.values() if p.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=10.0)
        self.faults.cancel()
        await self.faults.settle(10.0)
        if self._writing is not None:
            self._writing.cancel()
        with contextlib.suppress(OSError):
            self.record.write(self.record_dir)

    def kill_all(self) -> None:
        """SIGKILL to exactly the sessions this fleet started."""
        self.ending.set()
        self.killed = True
        self.faults.cancel()
        for child in (*self.running(workers=False), *self.running(workers=True)):
            child.kill()

    def record_of(self, spec: ChildSpec) -> ProcessRecord:
        for record in self.record.processes:
            if record.name == spec.name:
                return record
        record = ProcessRecord(spec.name, spec.role, str(spec.log), spec.address)
        self.record.processes.append(record)
        return record

    def mark(self, record: ProcessRecord, state: str) -> None:
        record.state = state
        self.write_record()

    def write_record(self) -> None:
        """Writes the record now, or as soon as that is possible again."""
        try:
            self.record.write(self.record_dir)
        except OSError as error:
            if not can_pass(error):
                self.note(f"{FILE} cannot be written: {in_words(error, self.record_dir)}")
            elif self._writing is None or self._writing.done():
                self._writing = asyncio.create_task(self._write_later())

    async def _write_later(self) -> None:
        async def write() -> None:
            self.record.write(self.record_dir)

        with contextlib.suppress(OSError):
            await self.passing.done(f"{FILE} cannot be written", write, self.record_dir)

    def fail(self, reason: str) -> None:
        if not self.failed.done():
            self.failed.set_result(reason)

    def _active(self) -> list[FleetProcess]:
        return [process for process in self.processes.values() if process.active]

    def _start_missing(self, name: str) -> None:
        process = self.processes.get(name)
        if process is None or process.state in (State.ENDED, State.NO_GPU):
            self._start_worker(name, f"starting {name}")

    def _start_worker(self, name: str, line: str = "") -> None:
        """Starts a worker, or a rank of one, if enough GPUs are free."""
        is_rank = rank_of(name) > 0
        pool = POLICY if is_rank else pool_of_worker(name)
        spec = self.specs.rank(name) if is_rank else self.specs.worker(pool, worker_index(name))
        process = self._process(spec)
        gpus = self.workers.take(name, self.worker_names())
        if gpus is not None:
            if line:
                self.note(line)
            process.start(self._seeing(spec, gpus))
        elif process.state is not State.NO_GPU:  # it is asked for again and again
            self.note(f"{name} waits for a free GPU: scale down or drain another worker")
            process.move(State.NO_GPU)

    def _process(self, spec: ChildSpec) -> FleetProcess:
        return self.processes.setdefault(spec.name, FleetProcess(self, spec.name, spec.role))

    def _seeing(self, spec: ChildSpec, gpus: Sequence[str]) -> ChildSpec:
        environment = {**spec.environment, **shown(gpus)}
        if self.workers.shared:
            environment[SHARES_GPU] = "1"
        return replace(spec, environment=environment)
