"""Simulation of a run of days: real controllers, and simulated workers and faults, in virtual time.

All times of the run are stretched by ``STRETCH``: what a controller does each second of a real run
it does once in so many virtual seconds. Times in this module are seconds of the timeline, that is
of the controllers; only faults come at the rates of virtual days.

Workers have no engine and no model: a rollout worker leases one group at a time and pulls weights
by itself, a replica sleeps for each group. Nothing is checked but that the run goes on, and nothing
is kept but what a real Redis would keep.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from time import thread_time
from typing import Any, ClassVar

from controller.ledger.specs import LATE_TRAIN, RunSpec
from controller.services import admin
from controller.services import rollout as rollout_service
from controller.store.journal import Entry
from paceline.ids import TaskId
from paceline.observe.vocabulary import FaultCause
from paceline.payloads.store import Ref
from paceline.v1 import admin_pb2, common_pb2, policy_pb2, rollout_pb2, worker_pb2
from testbed.simulator.cluster import Shape
from testbed.simulator.controller_process import ControllerProcess, Session
from testbed.simulator.gradient_mesh import Weights
from testbed.simulator.memory_store import Landed, MemoryRedis, order
from testbed.simulator.oracles.ledger import Oracle
from testbed.simulator.policy import SimulatedPolicyWorker
from testbed.simulator.rollout import SimulatedRolloutWorker
from testbed.simulator.virtual_time import Process, Timeline, VirtualHandle, settle
from testbed.simulator.worker import Fenced, SimulatedWorker
from testbed.simulator.world import World

STRETCH = 240.0
MINUTE, HOUR = 60.0 / STRETCH, 3600.0 / STRETCH
DAY = 24.0 * HOUR
OF_A_HOST = 8
"""Rollout workers of a host."""
LOADS_S = (1.0, 8.0)
"""How long it takes to pull a version."""
CAUSES = (
    FaultCause.KILLED,
    FaultCause.OUT_OF_MEMORY,
    FaultCause.CRASHED,
    FaultCause.ERROR,
    FaultCause.ERROR,
)


TIMED = 64
"""One callback of so many is timed: to read the clock of a thread takes longer than most."""


def clock_s() -> float:
    """What it costs to read that clock."""
    return min(-(thread_time() - thread_time()) for _ in range(1000))


class MeteredTimeline(Timeline):
    """Estimates the CPU time of what runs in some processes."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.cpu_s: dict[Process, float] = {}
        """By metered process."""
        self._callbacks = 0
        self._clock_s = clock_s()

    def add(
        self, delay: float, process: Process | None, callback: Callable[..., Any], args: Any
    ) -> VirtualHandle:
        self._callbacks += 1
        if self._callbacks % TIMED == 0 and process in self.cpu_s:
            callback, args = self._metered, (process, callback, args)
        return super().add(delay, process, callback, args)

    def _metered(self, process: Process, callback: Callable[..., Any], args: Any) -> None:
        began = thread_time()
        try:
            callback(*args)
        finally:
            self.cpu_s[process] += TIMED * max(0.0, thread_time() - began - self._clock_s)


@dataclass
class TrimmedRedis(MemoryRedis):
    """It forgets what was trimmed, replaced or deleted, and knows how large the rest is."""

    sizes: list[int] = field(default_factory=list)
    """Bytes of each entry of the stream."""
    appended: int = 0
    """Bytes of all entries so far."""

    @property
    def journal_bytes(self) -> int:
        return sum(self.sizes)

    @property
    def snapshot_bytes(self) -> int:
        return sum(map(len, self.snapshots))

    def append(self, before: str, term: int, batch: str, number: int, text: str) -> tuple[str, str]:
        held = len(self.entries)
        reply = super().append(before, term, batch, number, text)
        if len(self.entries) > held:
            self.sizes.append(len(text))
            self.appended += len(text)
        return reply

    def seen(self, entry: Entry) -> Landed:
        return Landed(entry, ())

    def save(self, data: str, term: int, trim_before: str) -> bool:
        if term != self.term:
            return False
        self.snapshots = [data]
        if trim_before:
            old = sum(landed.id < order(trim_before) for landed in self.entries)
            del self.entries[:old], self.sizes[:old]
        return True

    def delete(self, refs: list[Ref]) -> None:  # type: ignore[override]
        for ref in refs:
            self.deleted += self.payloads.pop(ref, None) is not None


class Watcher(Oracle):
    """It believes everything, and remembers no more than the newest commit."""

    def __init__(self, world: "LongRun") -> None:
        super().__init__(world.shape.spec, (), checked=False)
        self._world = world
        self.versions = _Steps(world)  # type: ignore[assignment]

    def landed(self, landed: Landed) -> None:
        for event in landed.entry.events:
            self.counts[event["type"]] += 1
            if event["type"] == "StepCommitted":
                self._world.committed(event["step"])

    def planned(self, plan: policy_pb2.StepPlan) -> None: ...
    def holds(self, *state: Any) -> None: ...
    def restored(self, *state: Any) -> None: ...
    def replied(self, *reply: Any) -> None: ...
    def receives(self, *weights: Any) -> None: ...
    def saved(self, *snapshot: Any) -> None: ...
    def check_replica(self, *replica: Any) -> None: ...
    def may_train(self, *plan: Any) -> bool:
        return False


class _Steps:
    """Steps of versions, as the leader knows them."""

    def __init__(self, world: "LongRun") -> None:
        self._world = world

    def get(self, version: int, default: int) -> int:
        leader = self._world.leader
        known = leader is not None and version >= 0
        return int(leader.ledger.state.versions.step_of(version)) if known else default


class LongRunReplica(SimulatedPolicyWorker):
    HEARTBEAT_S = 2.0
    SILENCE_S = 10.0
    cluster: "LongRun"

    @property
    def host(self) -> str:  # type: ignore[override]
        return f"host-{self.name}"

    async def _publish(self, incarnation: int) -> None:
        """Rollout workers pull."""

    def _hold(self, version: int) -> None:
        super()._hold(version)
        if version > self.cluster.newest.version or self.cluster.newest.state != self.state:
            self.cluster.newest = Weights(version, self.state)

    async def _vote(self, plan: policy_pb2.StepPlan, reduced: frozenset[str]) -> None:
        await super()._vote(plan, reduced)
        for epoch in self.cluster.epochs_alive():
            epoch.collectives.pop((plan.step, plan.mesh_epoch), None)


class LongRunEngine(SimulatedRolloutWorker):
    HEARTBEAT_S = 10.0
    SILENCE_S = 40.0
    PARITY_FAILURES = 0.0
    WAIT_S = 30.0
    cluster: "LongRun"

    def __init__(self, *known: Any) -> None:
        super().__init__(*known)
        self._pulling = False

    @property
    def host(self) -> str:  # type: ignore[override]
        return self.cluster.host_of(self.name)

    async def work(self) -> None:
        await asyncio.sleep(self.rng.uniform(0.5, 3.0))
        self.lifecycle = worker_pb2.LIFECYCLE_RUNNING
        self._send_report()
        self._pull()
        while not self.over:
            self.check()
            if self.fenced:
                raise Fenced("a request was fenced")
            if self.loaded_version < 0 or self.lifecycle != worker_pb2.LIFECYCLE_RUNNING:
                await self.news(self.HEARTBEAT_S)
            else:
                await self._work_once()

    async def _work_once(self) -> None:
        self.lease_seq += 1
        request = rollout_pb2.LeaseRequest(
            caller=self.caller,
            lease_seq=self.lease_seq,
            max_tasks=1,
            loaded_version=self.loaded_version,
            wait_s=self.WAIT_S,
        )
        reply = await self.call(
            rollout_service.lease_tasks, request, wait_s=self.WAIT_S, patience_s=2 * self.WAIT_S
        )
        if reply is None or not reply.leases:
            await self.news(self.rng.uniform(0.5, 1.5) * self.HEARTBEAT_S)
            return
        (lease,) = reply.leases
        off = self.create_future()
        self.running[(lease.task.task_id, lease.task.attempt)] = off
        await self._generate(lease, off)
        self.progress += 1

    def directed(self, session: Session, view: Any) -> None:
        super().directed(session, view)
        self._pull()

    def _pull(self) -> None:
        """Begins to pull the newest version, if it lacks it and pulls none."""
        behind = self.loaded_version < self.cluster.newest.version
        if behind and not self._pulling and self.directive.links:
            self._pulling = True
            self.call_later(self.rng.uniform(*LOADS_S), self._pulled)

    def _pulled(self) -> None:
        self._pulling = False
        newest = self.cluster.newest.version
        if self.directive.version < self.loaded_version:
            self.loaded_version = -1
        if newest > self.loaded_version and newest <= self.directive.version:
            self.loaded_version = newest
            self._send_report()
            changed, self._changed = self._changed, self.create_future()
            settle(changed)

    async def _submit(self, caller: common_pb2.Caller, group: rollout_pb2.Group) -> None:
        """Its metadata alone: nobody reads the payload."""
        samples, rng = len(group.completions), self.rng
        first = min(span.version for c in group.completions for span in c.versions)
        last = max(span.version for c in group.completions for span in c.versions)
        lengths = [rng.randrange(200, 4000) for _ in range(samples)]
        tokens = sum(lengths)
        spans = {first: tokens} if first == last else {first: tokens // 2, last: -(-tokens // 2)}
        train = group.kind == rollout_pb2.TASK_KIND_TRAIN
        meta = rollout_pb2.GroupMeta(
            task=group.task,
            kind=group.kind,
            digest=f"{rng.getrandbits(128):032x}" if train else "",
            prompt_tokens=200,
            min_version=first,
            max_version=last,
            token_versions=[common_pb2.VersionSpan(version=v, length=n) for v, n in spans.items()],
            sequence_versions=[
                rollout_pb2.SequenceVersions(versions=list(spans), sequences=samples)
            ],
            lengths=lengths,
            rewards=[float(rng.random() < 0.5) for _ in range(samples)],
            answers=[] if train else ["1"] * samples,
        )
        if train:
            self.cluster.redis.store([(TaskId(group.task.task_id), group.task.attempt)])
        request = rollout_pb2.SubmitRequest(caller=caller, groups=[meta])
        reply = await self.call(rollout_service.submit_groups, request)
        self.cluster.verdicts[reply.results[0].verdict] += 1

    def _group(self, lease: rollout_pb2.Lease, first: int) -> rollout_pb2.Group:
        group = rollout_pb2.Group(task=lease.task, kind=lease.kind)
        versions = sorted({max(0, first), max(0, self.loaded_version)})
        spans = [common_pb2.VersionSpan(version=v, length=1) for v in versions]
        for _ in range(lease.group_size):
            group.completions.add(versions=spans)
        return group


class LongRun(World):
    """``bad_hosts``: hosts whose workers die several times a day."""

    REDIS = TrimmedRedis
    KINDS: ClassVar = {"policy": LongRunReplica, "rollout": LongRunEngine}
    redis: TrimmedRedis
    timeline: MeteredTimeline

    def __init__(self, seed: int, shape: Shape, bad_hosts: tuple[str, ...] = ()) -> None:
        self.newest = Weights(0, "initial")
        self.verdicts: Counter[int] = Counter()
        self.faults: Counter[str] = Counter()
        self.recoveries: list[tuple[float, str, float]] = []
        """When a fault came, what it was, and how long no step was committed after it."""
        self.steps = 0
        self.dead_cpu_s = 0.0
        """CPU time of controllers that are gone."""
        self._open: list[tuple[float, str]] = []
        self._bad_hosts = bad_hosts
        super().__init__(seed, shape)

    # ---- what a cluster is made of --------------------------------------------------------

    def make_timeline(self) -> Timeline:
        return MeteredTimeline(self.rng)

    def make_oracle(self) -> Oracle:
        return Watcher(self)

    def start_controller(self, name: str) -> None:
        super().start_controller(name)
        self.timeline.cpu_s[self.controllers[name]] = 0.0

    def host_of(self, worker_id: str) -> str:
        return f"host-{int(worker_id.rpartition('-')[2]) // OF_A_HOST}"

    def epochs_alive(self) -> list[Any]:
        newest = list(self._epochs)[-1:]
        for key in list(self._epochs)[:-8]:
            del self._epochs[key]
        return [self._epochs[key] for key in newest]

    @property
    def leader_process(self) -> ControllerProcess | None:
        found = self.controllers.get(self.redis.leader)
        return found if found is not None and found.alive else None

    @property
    def leader(self) -> Any:
        process = self.leader_process
        return process.controller.leader if process is not None else None

    # ---- faults ---------------------------------------------------------------------------

    def committed(self, step: int) -> None:
        self.steps = step
        now = self.timeline.now
        self.recoveries += [(at, what, now - at) for at, what in self._open]
        self._open.clear()

    def struck(self, what: str, stops: bool = False) -> None:
        """``stops``: no step can be committed before the fault is over."""
        self.faults[what] += 1
        if stops:
            self._open.append((self.timeline.now, what))

    def plan(self) -> None:
        """Faults of a large fleet, each as often as it is there, plus the bad hosts' own."""
        size = self.shape.rollout / 1000
        self._often(HOUR / size, self._worker_dies)
        self._often(DAY, self._host_lost)
        self._often(12 * HOUR, self._host_cut_off)
        self._often(6 * HOUR, self._replica_dies)
        self._often(48 * HOUR, self._replica_hangs)
        self._often(6 * HOUR, self._leader_dies)
        self._often(DAY, self._redis_away)
        self._often(12 * HOUR, self._spot_reclaimed)
        for host in self._bad_hosts:
            self._often(3 * HOUR, partial(self._die_at, host))
        self._daily()

    def _often(self, mean_s: float, strike: Callable[[], None]) -> None:
        def struck() -> None:
            strike()
            self._often(mean_s, strike)

        self.timeline.after(self.rng.expovariate(1.0 / mean_s), struck)

    def _daily(self) -> None:
        """Somebody lets in again what was blocked."""
        for name in self.blocked():
            self.struck("let in again")
            request = f"allow-{name}-{self.timeline.now}"
            self.ask(admin.set_host, admin_pb2.HostRequest(request_id=request, host=name))
        self.timeline.after(DAY, self._daily)

    def blocked(self) -> list[str]:
        """Hosts that get no new work."""
        leader = self.leader
        hosts = leader.ledger.state.fleet.hosts.by_name if leader is not None else {}
        return [name for name, host in hosts.items() if host.blocked]

    def _living(self, role: str) -> list[SimulatedWorker]:
        return [w for w in self.workers.values() if w.alive and w.name.startswith(role)]

    def _on(self, host: str) -> list[SimulatedWorker]:
        return [w for w in self._living("rollout") if w.host == host]

    def _worker_dies(self) -> None:
        self.struck("worker")
        self.die(self.rng.choice(self._living("rollout")), self.rng.choice(CAUSES))

    def _die_at(self, host: str) -> None:
        if victims := self._on(host):
            self.struck("bad host")
            self.die(self.rng.choice(victims), FaultCause.CRASHED)

    def die(
        self,
        worker: SimulatedWorker,
        cause: FaultCause | None,
        away_s: float = 0.0,
        told: bool = False,
    ) -> None:
        """Its launcher tells the cause of four deaths in five, of this one for sure if ``told``;
        None: the launcher is gone too."""
        worker.kill()
        for controller in self.controllers.values():
            controller.call_soon(controller.session_lost, worker.name, worker.incarnation)
        told = told or self.rng.random() < 0.8
        if cause is not None and worker.incarnation and told:
            exited = admin_pb2.ExitReport(
                worker_id=worker.name, incarnation=worker.incarnation, exit_code=1, cause=cause
            )
            self.ask(admin.report_exit, exited)
        self._restart(worker, away_s or self.rng.uniform(1.0, 5.0))

    def crash(self, worker: SimulatedWorker) -> None:
        """It ends by itself, as if told to."""
        self.die(worker, FaultCause.ERROR)

    def _host_lost(self) -> None:
        self.struck("host")
        host = self.rng.choice(self._living("rollout")).host
        away_s = self.rng.uniform(20, 90) * MINUTE
        for worker in self._on(host):
            self.die(worker, None, away_s)

    def _host_cut_off(self) -> None:
        self.struck("partition")
        host, delay = self.rng.choice(self._living("rollout")).host, self.rng.uniform(10.0, 60.0)
        for worker in self._on(host):
            for name in self.controller_names:
                self.network.cut(worker.name, name)
                self.timeline.after(delay, self.network.mend, worker.name, name)

    def _replica_dies(self) -> None:
        if victims := self._living("policy"):
            self.struck("replica", stops=True)
            self.die(self.rng.choice(victims), self.rng.choice(CAUSES))

    def _replica_hangs(self) -> None:
        if victims := self._living("policy"):
            self.struck("hang", stops=True)
            self.rng.choice(victims).wedged = True

    def _leader_dies(self) -> None:
        if (leader := self.leader_process) is not None:
            self.struck("leader", stops=True)
            self.dead_cpu_s += self.timeline.cpu_s.pop(leader)
            self.crash_controller(leader.name, self.rng.uniform(1.0, 4.0))

    def _redis_away(self) -> None:
        self.struck("redis", stops=True)
        delay = self.rng.uniform(0.5, 3.0)
        for name in self.controller_names:
            self.network.cut(name, "redis")
            self.timeline.after(delay, self.network.mend, name, "redis")

    def _spot_reclaimed(self) -> None:
        """One worker in twenty goes for some hours."""
        self.struck("spot")
        living = self._living("rollout")
        for worker in self.rng.sample(living, max(1, len(living) // 20)):
            self.die(worker, FaultCause.KILLED, self.rng.uniform(1, 3) * HOUR)


def shape_of(rollouts: int, policies: int, groups: int, step_s: float, **other: Any) -> Shape:
    """A run of 128-sample steps and more; ``step_s``: usual time of a step."""
    spec = RunSpec(
        run_id="long",
        run_name="long",
        seed=1,
        steps=10_000_000,
        groups_per_step=groups,
        group_size=8,
        max_staleness=8,
        late_groups=LATE_TRAIN,
        max_token_age=16,
        max_attempts=3,
        dataset_rows=100_000,
        eval_rows=64,
        eval_every=100,
        checkpoint_every=10,
        filter_uninformative=True,
        shuffle=True,
        desired={"policy": policies, "rollout": rollouts},
        bounds={"host_window_s": int(DAY)},
    )
    spent_s = 0.7 * step_s * policies / groups
    usual_s = 1.1 * rollouts * step_s / groups
    return Shape(
        spec=spec,
        policy=policies,
        rollout=rollouts,
        slots=1,
        group_s=lambda rng: rng.uniform(0.8, 1.2) * spent_s,
        generate_s=lambda rng: usual_s * rng.lognormvariate(-0.18, 0.6),
        lease_ttl_s=30.0,
        snapshot_every=20_000,
        delay=0.002,
        **other,
    )
