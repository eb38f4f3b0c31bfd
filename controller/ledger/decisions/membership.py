"""Decisions about the members of the fleet: registration, reports, drains, deaths and their causes.
The tasks of a worker that leaves go to other workers. If it was a member of the mesh, the mesh is
formed again at once.

The fleet has ``rollout_spares`` more rollout workers than the desired count: loaded and up to date,
without leases until a worker is missing. A worker comes as a spare. While fewer work than desired,
a spare is put to work, first one that serves weights already. While more work than desired, the one
with the highest name stands by once it has finished its tasks.
"""

from controller.ledger import events as ev
from controller.ledger.decisions.commands import (
    CommandRefused,
    Decider,
    by_request,
    command,
    of_worker,
)
from controller.ledger.decisions.hosts import settle_hosts
from controller.ledger.decisions.leases import release
from controller.ledger.decisions.links import note_stored, send_again
from controller.ledger.decisions.mesh import lose_member
from controller.ledger.decisions.rejections import blame, drop_from_step
from controller.ledger.enums import (
    LIFECYCLE_TRANSITIONS,
    GroupFault,
    Lifecycle,
    Phase,
    ReleaseReason,
    Role,
)
from controller.ledger.limits import bounds_of, setting_of
from controller.ledger.specs import WorkerSpec, values
from controller.ledger.state.fleet import Worker
from controller.ledger.state.state import State
from paceline.errors import RefusalCode
from paceline.ids import Version
from paceline.observe.vocabulary import NO_FAULT, DeathCause, FaultCause, MeshEnd

SEEN_S = 2.0  # A launcher looks at its processes more often
_UNSETTLED = (
    FaultCause.UNATTRIBUTED,
    FaultCause.HEARTBEAT_SILENCE,
    FaultCause.COLLECTIVE_ERROR,
    FaultCause.HOST_LOST,
)  # Causes that better evidence may replace


@command
def register(d: Decider, now: float, c: WorkerSpec) -> None:
    """A process of a worker announces itself. Idempotent per incarnation."""
    fleet = d.state.fleet
    known = fleet.workers.get(c.worker_id)
    if known is not None and known.incarnation == c.incarnation:
        if not known.alive:
            raise CommandRefused(
                RefusalCode.FENCED, f"this process of {c.worker_id} is {known.lifecycle}"
            )
        return
    if c.incarnation in fleet.retired.get(c.worker_id, ()):
        raise CommandRefused(RefusalCode.FENCED, f"{c.worker_id} is another process now")
    _check_ranks(d, c)
    diverged = Version(-1) if known is None else known.diverged_version
    believed = diverged < c.state_version <= d.state.versions.version
    holds = c.state_version if believed else Version(-1)
    if known is not None:
        if known.alive:
            how, cause = DeathCause.REPLACED, FaultCause.REPLACED
            replaced = ev.WorkerDied(c.worker_id, known.incarnation, how, "", cause, known.host)
            _depart(d, known, replaced)
        else:
            _explain_by_return(d, now, known, c)
    spare = c.role is Role.ROLLOUT and desired_spares(d.state) > 0
    d.emit(ev.WorkerRegistered(**{**values(WorkerSpec, c), "state_version": holds}, spare=spare))
    # Names the files that it does not share with the first one that differs from it. Workers of
    # another kind may read some of them as well: the base of adapters.
    for other in (worker for role in Role for worker in fleet.living(role)):
        differing = [
            f"{setting} ({digest} here, {other.origins[setting]} there)"
            for setting, digest in sorted(c.origins.items())
            if other.origins.get(setting, digest) != digest
        ]
        if differing:
            d.emit(ev.OriginsDiffer(c.worker_id, other.worker_id, tuple(differing)))
            break
    d.settle_fleet(now)


def _check_ranks(d: Decider, c: WorkerSpec) -> None:
    """Rank i of every replica forms a mesh of its own: replicas must have equally many."""
    for other in d.state.fleet.living(c.role):
        unlike = other.worker_id != c.worker_id and other.ranks != c.ranks
        if unlike and c.role is Role.POLICY:
            raise CommandRefused(
                RefusalCode.INVALID,
                f"{c.worker_id} has {c.ranks} ranks, {other.worker_id} of this run has "
                f"{other.ranks}: start every replica with the same fleet.policy_ranks",
            )


def _declare_dead(
    d: Decider,
    now: float,
    worker_id: str,
    incarnation: int,
    how: DeathCause,
    detail: str = "",
    cause: FaultCause = FaultCause.UNATTRIBUTED,
    silent_s: float = 0.0,
) -> None:
    """Evidence says that this incarnation is gone; ``silent_s``: since it was last heard of."""
    worker = d.state.fleet.workers.get(worker_id)
    if worker is None or worker.incarnation != incarnation:
        return
    if not worker.alive:
        if how is DeathCause.EXIT:
            _explain(d, now, worker, cause, detail)
        return
    if worker.leaving:
        cause = FaultCause.ASKED_TO_LEAVE
    elif worker.stopped_t and now - worker.stopped_t <= silent_s + SEEN_S:
        # Its launcher saw it stopped; what it died of is known better if it saw the end, too.
        cause = cause if how is DeathCause.EXIT else FaultCause.STOPPED
    seen = how, detail, cause, worker.host, silent_s, now, _isolated(d.state, worker)
    event: ev.WorkerDied | ev.WorkerChanged = ev.WorkerDied(worker_id, incarnation, *seen)
    if d.state.phase is Phase.SUSPENDED:
        # The whole fleet ends now: however this worker did, it is no fault.
        event = ev.WorkerChanged(*worker.who, Lifecycle.STOPPED, Version(-1), Version(-1))
    _depart(d, worker, event)
    d.settle_fleet(now)


declare_dead = command(_declare_dead)


def _isolated(s: State, worker: Worker) -> bool:
    """True if it works at one task or group alone, because others have died of that."""
    trial = s.steps.open is not None and s.steps.open.trials.get(worker.worker_id)
    return bool(trial) or not worker.held.keys().isdisjoint(s.tasks.suspects)


@command
def record_exit(
    d: Decider, now: float, name: str, host: str, pid: int, cause: FaultCause, detail: str = ""
) -> None:
    """A launcher saw a worker's process end: that declares it dead. Any other process of that name
    ended before it had registered, or after another one had. Idempotent by name, host and pid."""
    worker = d.state.fleet.workers.get(name)
    if worker is not None and (worker.pid, worker.host) == (pid, host):
        _declare_dead(d, now, name, worker.incarnation, DeathCause.EXIT, detail, cause)
        return
    s, request_id = d.state, f"exit-{name}-{host}-{pid}"
    told = s.over or request_id in s.requests
    if not told and cause not in NO_FAULT and pid:
        d.emit(ev.ProcessFault(request_id, name, host, pid, cause, detail, now, over=True))
        settle_hosts(d, now)


@of_worker
def observe(
    d: Decider,
    now: float,
    worker: Worker,
    reported: Lifecycle,
    state_version: Version = Version(-1),
    loaded_version: Version = Version(-1),
    parity_failures: int = 0,
    parity_detail: str = "",
    load_failures: int = 0,
    load_detail: str = "",
    stored_weights: str = "",
) -> None:
    """The ledger's share of a worker's report: changes that matter become events. Failures are
    those of this incarnation so far."""
    who, newest = worker.who, d.state.versions.version
    highest = max(state_version, loaded_version)
    if disowned := highest > max(newest, worker.diverged_version):
        _disown(d, worker, highest)
    if parity_failures > worker.parity_failures:
        d.emit(ev.ParityFailed(*who, parity_failures, parity_detail))
    if load_failures > worker.load_failures:
        d.emit(ev.WeightsNotLoaded(*who, load_failures, load_detail))
    if stored_weights:
        note_stored(d, worker, stored_weights)
    holds = worker.state_version
    # A report can only make a replica a holder of the newest state: one that was under way during a
    # commit is older than the vote, and a diverged replica does not know that it has diverged.
    if worker.diverged_version < state_version == newest:
        holds = newest
    loaded = worker.loaded_version
    if loaded < loaded_version <= newest and loaded_version != worker.withdrawn_version:
        loaded = loaded_version
    # A process only moves forward; a report that says otherwise was overtaken by a newer one.
    newer = reported in LIFECYCLE_TRANSITIONS[worker.lifecycle] and reported is not Lifecycle.DEAD
    lifecycle = reported if newer else worker.lifecycle
    same = (lifecycle, holds) == (worker.lifecycle, worker.state_version)
    loads = loaded != worker.loaded_version
    event = ev.WorkerChanged(*who, lifecycle, holds, loaded)
    if lifecycle is Lifecycle.STOPPED:
        _depart(d, worker, event)
    elif loads or not same:
        d.emit(event)
    # It may have sent what is disowned now.
    if disowned or not same:
        d.settle_fleet(now)
    elif loads:
        # As all of them do after each commit: that concerns no other worker.
        d.settle_evals(now)


def _disown(d: Decider, worker: Worker, version: Version) -> None:
    """The worker holds a version that was never committed: Redis has lost the end of the journal,
    as a failover to a replica of it can. Others may hold the state before it; else it is rolled
    back."""
    s = d.state
    d.emit(ev.WorkerChanged(*worker.who, worker.lifecycle, Version(-1), Version(-1), version))
    if s.fleet.in_mesh(worker):
        detail = f"{worker.worker_id} holds version {version}, the newest is {s.versions.version}"
        lose_member(d, MeshEnd.LOST_COMMIT, detail)
    if worker.role is Role.ROLLOUT:
        # A new link begins with what its receiver should have.
        send_again(d, [worker.worker_id], lost_commit=True)


def _drain(
    d: Decider,
    now: float,
    request_id: str,
    worker_id: str,
    replace: bool = False,
    incarnation: int = 0,
) -> None:
    """Without ``replace`` the desired count falls by one with the same event. Refused if another
    process has that name than the ``incarnation``; 0: any."""
    worker = d.state.fleet.workers.get(worker_id)
    if worker is None or not worker.alive:
        raise CommandRefused(RefusalCode.UNKNOWN, f"no living worker is named {worker_id!r}")
    if incarnation not in (0, worker.incarnation):
        raise CommandRefused(
            RefusalCode.CHANGED,
            f"conflict: {worker_id} is another process now; re-read the status and retry",
        )
    fewer = {} if replace or worker.leaving else _one_fewer(d, worker)
    d.emit(ev.Drained(request_id, worker_id, fewer))


# The workers of a run that has ended may still be asked to leave.
drain = by_request(_drain, after_end=True)


def _one_fewer(d: Decider, worker: Worker) -> dict[str, int]:
    """The desired count that changes when ``worker`` leaves for good. Refused below the minimum."""
    s, pool = d.state, worker.pool
    staying = [w for w in s.fleet.living_in(pool) if not w.leaving and not w.spare]
    desired = s.desired.get(pool, 0)
    if worker.spare or len(staying) > desired:
        return {}  # one of the surplus
    least, _ = bounds_of(s.bounds, pool)
    if desired - 1 < least:
        raise CommandRefused(
            RefusalCode.INVALID,
            f"without {worker.worker_id} the desired count would be {pool}={desired - 1}, below "
            f"fleet.{setting_of(pool)}_min = {least}. Replace the worker (--replace), or lower the "
            "minimum",
        )
    return {pool: desired - 1}


def _depart(d: Decider, worker: Worker, event: ev.WorkerDied | ev.WorkerChanged) -> None:
    """The worker leaves the fleet, dead or by itself; the tasks it holds go to other workers."""
    s = d.state
    died, reason, how = False, ReleaseReason.OWNER_STOPPED, ""
    if isinstance(event, ev.WorkerDied):
        died, reason, how = True, ReleaseReason.OWNER_DIED, event.how
    # A worker that was asked to leave may be killed for being slow at it: no task's fault.
    suspected = died and not worker.leaving
    # Of several tasks any one may be the cause: only a task that was held by itself is charged.
    counts = suspected and len(worker.held) == 1
    for task_id in list(worker.held):
        task = s.tasks.records[task_id]
        release(d, task, worker, reason, counts=counts, detail=how, suspected=suspected)
    condemned = blame(d, worker) if died else []
    d.emit(event)
    if condemned:
        detail = f"{s.run.max_attempts} trainers died with it, the last one was {worker.worker_id}"
        drop_from_step(d, condemned, GroupFault.KILLED_TRAINERS, detail)
    if s.fleet.in_mesh(worker) and not s.over:
        lose_member(d, MeshEnd.MEMBER_DIED, worker.worker_id)


@command
def record_fault(
    d: Decider,
    now: float,
    request_id: str,
    name: str,
    host: str,
    pid: int,
    cause: FaultCause,
    detail: str = "",
) -> None:
    """A launcher saw a fault of a process that is no worker, or of one that still runs. Idempotent
    by request_id."""
    if d.state.ended or request_id in d.state.requests:
        return
    worker = d.state.fleet.workers.get(name)
    if worker is not None and (worker.pid, worker.host) == (pid, host) and not worker.alive:
        # The word was slower than the lease.
        _explain(d, now, worker, cause, detail)
        return
    d.emit(ev.ProcessFault(request_id, name, host, pid, cause, detail, now))


def _explain(d: Decider, now: float, worker: Worker, cause: FaultCause, detail: str) -> None:
    """Better evidence about a dead worker than that on which it was declared dead."""
    if worker.death in _UNSETTLED and cause not in (worker.death, FaultCause.UNATTRIBUTED):
        d.emit(ev.FaultExplained(*worker.who, cause, detail, now))
        settle_hosts(d, now)


def _explain_by_return(d: Decider, now: float, dead: Worker, c: WorkerSpec) -> None:
    """A worker is back: its very process, which then was only out of reach, or another one."""
    if (c.pid, c.host) == (dead.pid, dead.host):
        words = "its process is back: it could not reach the controllers"
        _explain(d, now, dead, FaultCause.NETWORK_PARTITION, words)
    elif c.cgroup and c.cgroup == dead.cgroup and 0 <= dead.memory_kills < c.memory_kills:
        words = f"the kernel has killed in cgroup {c.cgroup} since it had registered"
        _explain(d, now, dead, FaultCause.OUT_OF_MEMORY, words)


def desired_spares(state: State) -> int:
    return state.bounds.get("rollout_spares", 0)


def missing_at_work(state: State) -> int:
    """Rollout workers that should be put to work; negative: that should stand by."""
    working, spares = len(state.fleet.at_work()), len(_spares(state))
    desired = state.desired.get("rollout", 0) if desired_spares(state) else working + spares
    return min(desired - working, spares)


def settle_spares(d: Decider) -> None:
    if d.state.ended:
        return
    missing = missing_at_work(d.state)
    if missing > 0:
        by_name = sorted(_spares(d.state), key=lambda w: w.worker_id)
        changed = sorted(by_name, key=lambda w: not w.joinable or w.loaded_version < 0)[:missing]
    else:
        last_first = sorted(d.state.fleet.at_work(), key=lambda w: w.worker_id, reverse=True)
        changed = last_first[:-missing] if missing else []
    for worker in changed:
        d.emit(ev.SpareSet(*worker.who, not worker.spare))


def _spares(state: State) -> list[Worker]:
    spares = (w for w in state.fleet.living(Role.ROLLOUT) if w.spare and not w.leaving)
    return [w for w in spares if not state.fleet.shuns(w)]
