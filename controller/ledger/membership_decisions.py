"""Decisions about the fleet: joins and deaths, and the mesh and weights links that follow from them.

- Joins and leaves of the mesh wait for the end of the open step; a death does not.
- If no epoch of a replica succeeds, for example because the source of the state cannot reach it, it is
  left out until it is restarted or the source is another one: it would block every other replica
  forever.
- While a living member of the mesh holds the newest state, its step goes on. If no living replica holds
  that state, the run goes back to the newest checkpoint.
"""

from __future__ import annotations

from controller.ledger.commands import (
    BreakLink,
    BreakMesh,
    CommandRefused,
    DeclareDead,
    Drain,
    FormMesh,
    Observe,
    Register,
)
from controller.ledger.decider import Decider
from controller.ledger.enums import (
    LIFECYCLE_TRANSITIONS,
    DeathCause,
    Lifecycle,
    MeshEnd,
    ReleaseReason,
    Role,
)
from controller.ledger.events import (
    Drained,
    LinkAssigned,
    MeshBroken,
    MeshFormed,
    RolledBack,
    StepAborted,
    WorkerChanged,
    WorkerDied,
    WorkerRegistered,
)
from controller.ledger.facts import Member
from controller.ledger.fleet import Worker
from controller.ledger.lease_decisions import release
from controller.ledger.scale_limits import bounds_of
from controller.ledger.standby_workers import desired_spares
from controller.ledger.state import Phase
from controller.ledger.step_decisions import reshard
from paceline.ids import MeshEpoch, Version
from paceline.rpc.refusal_code import RefusalCode


def register(d: Decider, c: Register, now: float) -> None:
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
    believed = c.state_version
    if believed > d.state.versions.version:
        believed = Version(-1)
    _check_ranks(d, c)
    if known is not None:
        if believed <= known.diverged_version:
            believed = Version(-1)
        if known.alive:
            _depart(
                d, known, WorkerDied(c.worker_id, known.incarnation, DeathCause.REPLACED, ""), now
            )
    d.emit(
        WorkerRegistered(
            worker_id=c.worker_id,
            incarnation=c.incarnation,
            role=c.role,
            host=c.host,
            pid=c.pid,
            tensor_host=c.tensor_host,
            ranks=c.ranks,
            state_version=believed,
            spare=c.role is Role.ROLLOUT and desired_spares(d.state) > 0,
        )
    )
    d.settle_fleet(now)


def _check_ranks(d: Decider, c: Register) -> None:
    """Rank i of every replica forms a mesh of its own: replicas must have equally many."""
    if c.role is not Role.POLICY:
        return
    for other in d.state.fleet.living(Role.POLICY):
        if other.worker_id != c.worker_id and other.ranks != c.ranks:
            raise CommandRefused(
                RefusalCode.INVALID,
                f"{c.worker_id} has {c.ranks} ranks, {other.worker_id} of this run has "
                f"{other.ranks}: start every replica with the same fleet.policy_ranks",
            )


def declare_dead(d: Decider, c: DeclareDead, now: float) -> None:
    worker = d.state.fleet.current(c.worker_id, c.incarnation)
    if worker is not None:
        _depart(d, worker, WorkerDied(c.worker_id, c.incarnation, c.how, c.detail), now)
        d.settle_fleet(now)


def observe(d: Decider, c: Observe, now: float) -> None:
    worker = d.caller(c.worker_id, c.incarnation)
    newest = d.state.versions.version
    if max(c.state_version, c.loaded_version) > max(newest, worker.diverged_version):
        _disown(d, worker, max(c.state_version, c.loaded_version))
    state_version = worker.state_version
    # A report can only make a replica a holder of the newest state: one that was under way during a
    # commit is older than the vote, and a diverged replica does not know that it has diverged.
    if worker.diverged_version < c.state_version == newest:
        state_version = newest
    loaded = worker.loaded_version
    if loaded < c.loaded_version <= newest:
        loaded = c.loaded_version
    lifecycle = _next_lifecycle(worker.lifecycle, c.lifecycle)
    if (lifecycle, state_version, loaded) == (
        worker.lifecycle,
        worker.state_version,
        worker.loaded_version,
    ):
        return
    event = WorkerChanged(c.worker_id, c.incarnation, lifecycle, state_version, loaded)
    if lifecycle is Lifecycle.STOPPED:
        _depart(d, worker, event, now)
    else:
        d.emit(event)
    d.settle_fleet(now)


def _disown(d: Decider, worker: Worker, version: Version) -> None:
    """The worker holds a version that was never committed: Redis has lost the end of the journal, as
    a failover to a replica of it can. Others may hold the state before it; else it is rolled back."""
    s = d.state
    who = (worker.worker_id, worker.incarnation)
    d.emit(WorkerChanged(*who, worker.lifecycle, Version(-1), Version(-1), version))
    mesh = s.fleet.mesh
    if mesh is not None and mesh.rank(*who) >= 0:
        if not mesh.broken:
            detail = f"{worker.worker_id} holds version {version}, the newest is"
            d.emit(MeshBroken(mesh.epoch, MeshEnd.LOST_COMMIT, f"{detail} {s.versions.version}"))
            mend_mesh(d)
        else:
            _abort_hopeless_step(d)
    publisher = s.fleet.publisher(s.versions.version)
    if worker.role is Role.ROLLOUT and publisher is not None:
        # A new link begins with what its receiver should have.
        _assign(d, publisher, worker)


def _next_lifecycle(now: Lifecycle, reported: Lifecycle) -> Lifecycle:
    """A process only moves forward; a report that says otherwise was overtaken by a newer one."""
    newer = reported in LIFECYCLE_TRANSITIONS[now] and reported is not Lifecycle.DEAD
    return reported if newer else now


def drain(d: Decider, c: Drain, now: float) -> str:
    requests = d.state.requests
    if c.request_id in requests:
        return requests[c.request_id]
    worker = d.state.fleet.workers.get(c.worker_id)
    if worker is None or not worker.alive:
        raise CommandRefused(RefusalCode.UNKNOWN, f"no living worker is named {c.worker_id!r}")
    if c.incarnation not in (0, worker.incarnation):
        raise CommandRefused(
            RefusalCode.CHANGED,
            f"conflict: {c.worker_id} is another process now; re-read the status and retry",
        )
    fewer = {} if c.replace or worker.leaving else _one_fewer(d, worker)
    d.emit(Drained(c.request_id, c.worker_id, fewer))
    d.settle_fleet(now)
    return requests[c.request_id]


def _one_fewer(d: Decider, worker: Worker) -> dict[str, int]:
    """The desired count that changes when ``worker`` leaves for good. Refused below the minimum."""
    s, role = d.state, str(worker.role)
    staying = [w for w in s.fleet.living(worker.role) if not w.leaving and not w.spare]
    desired = s.desired.get(role, 0)
    if worker.spare or len(staying) > desired:
        return {}  # one of the surplus
    least, _ = bounds_of(s.bounds, role)
    if desired - 1 < least:
        raise CommandRefused(
            RefusalCode.INVALID,
            f"without {worker.worker_id} the desired count would be {role}={desired - 1}, below "
            f"fleet.{role}_min = {least}. Replace the worker (--replace), or lower the minimum",
        )
    return {role: desired - 1}


def _depart(d: Decider, worker: Worker, event: WorkerDied | WorkerChanged, now: float) -> None:
    """The worker leaves the fleet, dead or by itself; the tasks it holds go to other workers."""
    s = d.state
    died = isinstance(event, WorkerDied)
    # A worker that was asked to leave may be killed for being slow at it: no task's fault.
    suspected = died and not worker.leaving
    # Of several tasks any one may be the cause: only a task that was held by itself is charged.
    counts = suspected and len(worker.held) == 1
    for task_id in list(worker.held):
        task = s.tasks.records[task_id]
        detail = event.how if isinstance(event, WorkerDied) else ""
        reason = ReleaseReason.OWNER_DIED if died else ReleaseReason.OWNER_STOPPED
        release(d, task, worker, reason, counts=counts, detail=detail, suspected=suspected)
    mesh = s.fleet.mesh
    member = mesh is not None and mesh.rank(worker.worker_id, worker.incarnation) >= 0
    d.emit(event)
    if not member or s.ended:
        return
    assert mesh is not None
    if not mesh.broken:
        d.emit(MeshBroken(mesh.epoch, MeshEnd.MEMBER_DIED, worker.worker_id))
        mend_mesh(d)
    else:
        _abort_hopeless_step(d)


def break_mesh(d: Decider, c: BreakMesh, now: float) -> None:
    d.caller(c.worker_id, c.incarnation)
    mesh = d.state.fleet.mesh
    if mesh is None or mesh.broken or mesh.epoch != c.epoch:
        return
    if mesh.rank(c.worker_id, c.incarnation) >= 0:
        fleet = d.state.fleet
        detail = f"{c.worker_id}: {c.detail}"
        newest = d.state.versions.version
        for worker in fleet.blamed():
            failures = fleet.after_failure(worker, now)
            if fleet.hopeless(worker, failures, newest) and not fleet.left_out(worker, newest):
                source = mesh.members[max(0, mesh.source_rank)].worker_id
                detail += (
                    f"; {failures.epochs} epochs of {worker.worker_id} and {source} failed in a row: "
                    f"{worker.worker_id} is left out. Check the network between them, then restart it"
                )
        d.emit(MeshBroken(mesh.epoch, MeshEnd.PEER_ERROR, detail, broken_t=now))


def form_mesh(d: Decider, c: FormMesh, now: float) -> None:
    mesh = d.state.fleet.mesh
    # The run may have ended since the evidence was looked at.
    if mesh is not None and mesh.broken and not d.state.ended:
        mend_mesh(d)
        d.settle_fleet(now)


def mend_mesh(d: Decider) -> None:
    """Forms the epoch after a broken one: at once with its survivors while a step is open."""
    s = d.state
    mesh = s.fleet.mesh
    assert mesh is not None and mesh.broken
    _abort_hopeless_step(d)
    if s.steps.open is None:
        _form(d, _next_members(d) or [])
        return
    survivors = [w for m in mesh.members if (w := s.fleet.member(m)) is not None]
    _form(d, [w for w in survivors if not s.fleet.left_out(w, s.versions.version)])
    assert s.fleet.mesh is not None
    reshard(d, s.fleet.mesh)


def _abort_hopeless_step(d: Decider) -> None:
    s = d.state
    mesh, step = s.fleet.mesh, s.steps.open
    if step is None:
        return
    members = mesh.members if mesh else ()
    survivors = [w for m in members if (w := s.fleet.member(m)) is not None]
    if all(w.state_version != s.versions.version for w in survivors):
        d.emit(StepAborted(step.step, "no living member holds the state before it"))


def settle_mesh(d: Decider) -> None:
    """Between steps: forms a new epoch if replicas are ready to join or leave."""
    s = d.state
    if s.ended or s.steps.open is not None:
        return
    mesh = s.fleet.mesh
    survivors = [w for m in mesh.members if (w := s.fleet.member(m))] if mesh else []
    if mesh is not None and mesh.broken and survivors:
        return  # liveness sends FormMesh once the evidence is in
    members = _next_members(d)
    if members is None:
        return
    if mesh is not None and not mesh.broken:
        current = [(m.worker_id, m.incarnation) for m in mesh.members]
        if current == [(w.worker_id, w.incarnation) for w in members]:
            return
        stays = any(w.state_version == s.versions.version for w in survivors)
        if stays and (s.phase is Phase.STOPPING or s.versions.step >= s.run.steps):
            return  # the last checkpoint needs no new member
        d.emit(MeshBroken(mesh.epoch, MeshEnd.MEMBERSHIP))
    _form(d, members)


def _next_members(d: Decider) -> list[Worker] | None:
    """Members of the next epoch in rank order; None: the mesh stays as it is for now."""
    s = d.state
    mesh = s.fleet.mesh
    staying = [w for m in (mesh.members if mesh else ()) if (w := s.fleet.member(m))]
    others = sorted(
        (w for w in s.fleet.living(Role.POLICY) if w not in staying), key=lambda w: w.worker_id
    )
    newest = s.versions.version
    joining = [w for w in [*staying, *others] if w.joinable and not s.fleet.left_out(w, newest)]
    if any(w.state_version == newest for w in joining):
        return joining
    holders = [w for w in [*staying, *others] if w.state_version == newest]
    if not holders:
        return joining
    # The only replicas with the state are leaving or not ready. A leaving one stays until another
    # has been seeded; for one that is coming the others wait.
    leaving = next((w for w in holders if w.leaving), None)
    return None if leaving is None else [leaving, *joining]


def _form(d: Decider, workers: list[Worker]) -> None:
    s = d.state
    if not workers:
        return
    newest = s.versions.version
    restore = all(w.state_version != newest for w in workers)
    checkpoint = s.versions.checkpoint
    if restore:
        roll_back(d)
    version = s.versions.version
    members = tuple(
        Member(
            w.worker_id, w.incarnation, w.tensor_host, not restore and w.state_version != version
        )
        for w in workers
    )
    source = next((r for r, w in enumerate(workers) if w.state_version == version), -1)
    d.emit(
        MeshFormed(
            epoch=MeshEpoch(s.fleet.mesh_epoch + 1),
            members=members,
            state_version=version,
            step=s.versions.step,
            source_rank=source,
            restore=restore,
            checkpoint_path=checkpoint.path if restore else "",
        )
    )


def roll_back(d: Decider) -> None:
    """Goes back to the newest checkpoint, unless that is done already."""
    s = d.state
    newest = s.versions.version
    lost = max((w.diverged_version for w in s.fleet.workers.values()), default=Version(-1))
    if newest == s.versions.restore_version and lost <= newest:
        return
    d.emit(
        RolledBack(
            step=s.versions.checkpoint.step,
            # A worker may still hold a lost commit: its version must not be given to another state.
            version=Version(max(newest, lost) + 1),
            from_step=s.versions.step,
            from_version=newest,
            checkpoint_path=s.versions.checkpoint.path,
        )
    )


def settle_links(d: Decider) -> None:
    """One link for every living rollout worker, from a replica that holds the newest state."""
    s = d.state
    if s.ended:
        return
    publisher = s.fleet.publisher(s.versions.version)
    if publisher is None:
        return
    for receiver in s.fleet.living(Role.ROLLOUT):
        link = s.fleet.links.get(receiver.worker_id)
        if link is None or not _serves(d, link):
            _assign(d, publisher, receiver)


def _serves(d: Decider, link: LinkAssigned) -> bool:
    """A link stays with its publisher while that is a member and holds the newest state."""
    s = d.state
    fleet = s.fleet
    sender = fleet.current(link.publisher, link.publisher_incarnation)
    return (
        sender is not None
        and sender.state_version == s.versions.version
        and fleet.mesh is not None
        and fleet.mesh.rank(sender.worker_id, sender.incarnation) >= 0
        and fleet.current(link.receiver, link.receiver_incarnation) is not None
    )


def break_link(d: Decider, c: BreakLink, now: float) -> None:
    d.caller(c.worker_id, c.incarnation)
    fleet = d.state.fleet
    link = next((x for x in fleet.links.values() if x.epoch == c.epoch), None)
    if link is None or c.worker_id not in (link.publisher, link.receiver):
        return
    publisher = fleet.publisher(d.state.versions.version)
    receiver = fleet.current(link.receiver, link.receiver_incarnation)
    if publisher is not None and receiver is not None:
        _assign(d, publisher, receiver)


def _assign(d: Decider, publisher: Worker, receiver: Worker) -> None:
    d.emit(
        LinkAssigned(
            epoch=d.state.fleet.link_epoch + 1,
            publisher=publisher.worker_id,
            publisher_incarnation=publisher.incarnation,
            receiver=receiver.worker_id,
            receiver_incarnation=receiver.incarnation,
        )
    )
