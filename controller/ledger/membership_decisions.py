"""Who belongs to the fleet, and what the mesh and the weights links look like because of it.

- Joins and leaves of the mesh wait for the end of the open step; a death does not.
- A replica with which no epoch comes to anything, as where the source of the state cannot reach it,
  is left out until it is started anew or the source is another one: it would hold up every other one
  for ever.
- While a member of the mesh lives that holds the newest state, the step it is in goes on. When
  nobody living holds that state, the run goes back to the newest checkpoint.
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
    Role,
)
from controller.ledger.decider import Decider
from controller.ledger.events import (
    Drained,
    LinkAssigned,
    Member,
    MeshBroken,
    MeshFormed,
    RolledBack,
    StepAborted,
    WorkerChanged,
    WorkerDied,
    WorkerRegistered,
)
from controller.ledger.fleet import Lifecycle, Worker
from controller.ledger.lease_decisions import release
from controller.ledger.scale_limits import bounds_of
from controller.ledger.standby_workers import desired_spares
from controller.ledger.state import Phase
from controller.ledger.step_decisions import reshard


def register(d: Decider, c: Register, now: float) -> None:
    fleet = d.state.fleet
    known = fleet.workers.get(c.worker_id)
    if known is not None and known.incarnation == c.incarnation:
        if not known.alive:
            raise CommandRefused("fenced", f"this process of {c.worker_id} is {known.lifecycle}")
        return
    if c.incarnation in fleet.retired.get(c.worker_id, ()):
        raise CommandRefused("fenced", f"{c.worker_id} is another process now")
    believed = c.state_version
    if believed > d.state.versions.version:
        believed = -1
    _check_ranks(d, c)
    if known is not None:
        if believed <= known.diverged_version:
            believed = -1
        if known.alive:
            _depart(d, known, WorkerDied(c.worker_id, known.incarnation, "replaced", ""), now)
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
                "invalid",
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
    # A replica's word can only make it a holder of the newest state: a report that was under way
    # during a commit is older than the vote, and a diverged replica does not know that it is.
    if worker.diverged_version < c.state_version == newest:
        state_version = newest
    loaded = worker.loaded_version
    if loaded < c.loaded_version <= newest:
        loaded = c.loaded_version
    lifecycle = _next_lifecycle(worker.lifecycle, Lifecycle(c.lifecycle))
    if (lifecycle, state_version, loaded) == (
        worker.lifecycle,
        worker.state_version,
        worker.loaded_version,
    ):
        return
    event = WorkerChanged(c.worker_id, c.incarnation, str(lifecycle), state_version, loaded)
    if lifecycle is Lifecycle.STOPPED:
        _depart(d, worker, event, now)
    else:
        d.emit(event)
    d.settle_fleet(now)


def _disown(d: Decider, worker: Worker, version: int) -> None:
    """The worker holds a version that was never committed: Redis has lost the end of the journal, as
    a failover to a replica of it can. Others may hold the state before it; else it is rolled back."""
    s = d.state
    who = (worker.worker_id, worker.incarnation)
    d.emit(WorkerChanged(*who, str(worker.lifecycle), -1, -1, version))
    mesh = s.fleet.mesh
    if mesh is not None and mesh.rank(*who) >= 0:
        if not mesh.broken:
            detail = f"{worker.worker_id} holds version {version}, the newest is"
            d.emit(MeshBroken(mesh.epoch, "lost_commit", f"{detail} {s.versions.version}"))
            mend_mesh(d)
        else:
            _abort_hopeless_step(d)
    publisher = s.fleet.publisher(s.versions.version)
    if worker.role is Role.ROLLOUT and publisher is not None:
        # A new link begins with what its receiver should have.
        _assign(d, publisher, worker)


_ORDER = (Lifecycle.STARTING, Lifecycle.RUNNING, Lifecycle.DRAINING, Lifecycle.STOPPED)


def _next_lifecycle(now: Lifecycle, said: Lifecycle) -> Lifecycle:
    """A process only grows older; a report that says otherwise was overtaken."""
    if said not in _ORDER:
        return now
    return max(now, said, key=_ORDER.index)


def drain(d: Decider, c: Drain, now: float) -> str:
    requests = d.state.requests
    if c.request_id in requests:
        return requests[c.request_id]
    worker = d.state.fleet.workers.get(c.worker_id)
    if worker is None or not worker.alive:
        raise CommandRefused("unknown", f"no living worker {c.worker_id!r}")
    if c.incarnation not in (0, worker.incarnation):
        raise CommandRefused(
            "changed", f"{c.worker_id} has been replaced by another process: look again"
        )
    fewer = {} if c.replace or worker.leaving else _one_fewer(d, worker)
    d.emit(Drained(c.request_id, c.worker_id, fewer))
    d.settle_fleet(now)
    return requests[c.request_id]


def _one_fewer(d: Decider, worker: Worker) -> dict[str, int]:
    """What is wanted once ``worker`` has gone for good. Refused below the least."""
    s, role = d.state, str(worker.role)
    staying = [w for w in s.fleet.living(worker.role) if not w.leaving and not w.spare]
    wanted = s.desired.get(role, 0)
    if worker.spare or len(staying) > wanted:
        return {}  # one of the surplus
    least, _ = bounds_of(s.bounds, role)
    if wanted - 1 < least:
        raise CommandRefused(
            "invalid",
            f"without {worker.worker_id}, {role}={wanted - 1} would be wanted, fleet.{role}_min = "
            f"{least}: have it replaced (--replace), or lower the minimum",
        )
    return {role: wanted - 1}


def _depart(d: Decider, worker: Worker, event: WorkerDied | WorkerChanged, now: float) -> None:
    """The worker leaves the fleet, by death or with a goodbye; what it holds goes to others."""
    s = d.state
    died = isinstance(event, WorkerDied)
    # Whoever was told to leave may be killed for being slow at it: no task's fault.
    suspected = died and not worker.leaving
    # Which of several tasks a worker died of cannot be told: only a task held alone is charged.
    counts = suspected and len(worker.held) == 1
    for task_id in list(worker.held):
        task = s.tasks.records[task_id]
        detail = event.how if isinstance(event, WorkerDied) else ""
        reason = "owner_died" if died else "owner_stopped"
        release(d, task, worker, reason, counts=counts, detail=detail, suspected=suspected)
    mesh = s.fleet.mesh
    member = mesh is not None and mesh.rank(worker.worker_id, worker.incarnation) >= 0
    d.emit(event)
    if not member or s.ended:
        return
    assert mesh is not None
    if not mesh.broken:
        d.emit(MeshBroken(mesh.epoch, "member_died", worker.worker_id))
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
                    f"; no epoch of {worker.worker_id} and {source} came to anything, "
                    f"{failures.epochs} times in a row, {worker.worker_id} is left out: see to the "
                    "network between them, then start it anew"
                )
        d.emit(MeshBroken(mesh.epoch, "peer_error", detail, broken_t=now))


def form_mesh(d: Decider, c: FormMesh, now: float) -> None:
    mesh = d.state.fleet.mesh
    # Whoever asked may not have seen that the run has ended.
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
        _form(d, _wanted_members(d) or [])
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
    """Between steps: takes in who is ready, lets go who leaves."""
    s = d.state
    if s.ended or s.steps.open is not None:
        return
    mesh = s.fleet.mesh
    survivors = [w for m in mesh.members if (w := s.fleet.member(m))] if mesh else []
    if mesh is not None and mesh.broken and survivors:
        return  # whoever watches the evidence says when: FormMesh
    wanted = _wanted_members(d)
    if wanted is None:
        return
    if mesh is not None and not mesh.broken:
        current = [(m.worker_id, m.incarnation) for m in mesh.members]
        if current == [(w.worker_id, w.incarnation) for w in wanted]:
            return
        stays = any(w.state_version == s.versions.version for w in survivors)
        if stays and (s.phase is Phase.STOPPING or s.versions.step >= s.run.steps):
            return  # nobody needs to join for the last checkpoint
        d.emit(MeshBroken(mesh.epoch, "membership"))
    _form(d, wanted)


def _wanted_members(d: Decider) -> list[Worker] | None:
    """Members of the next epoch in rank order; None: leave it as it is for now."""
    s = d.state
    mesh = s.fleet.mesh
    staying = [w for m in (mesh.members if mesh else ()) if (w := s.fleet.member(m))]
    others = sorted(
        (w for w in s.fleet.living(Role.POLICY) if w not in staying), key=lambda w: w.worker_id
    )
    newest = s.versions.version
    wanted = [w for w in [*staying, *others] if w.joinable and not s.fleet.left_out(w, newest)]
    if any(w.state_version == newest for w in wanted):
        return wanted
    holders = [w for w in [*staying, *others] if w.state_version == newest]
    if not holders:
        return wanted
    # The only replicas with the state are leaving or not ready. A leaving one stays until another
    # has been seeded; for one that is coming the others wait.
    leaving = next((w for w in holders if w.leaving), None)
    return None if leaving is None else [leaving, *wanted]


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
            epoch=s.fleet.mesh_epoch + 1,
            members=members,
            state_version=version,
            step=s.versions.step,
            source_rank=source,
            restore=restore,
            checkpoint_path=checkpoint.path if restore else "",
        )
    )


def roll_back(d: Decider) -> None:
    """To the newest checkpoint, where that is not done yet."""
    s = d.state
    newest = s.versions.version
    lost = max((w.diverged_version for w in s.fleet.workers.values()), default=-1)
    if newest == s.versions.restore_version and lost <= newest:
        return
    d.emit(
        RolledBack(
            step=s.versions.checkpoint.step,
            # Nothing that a worker may still hold of a lost commit may be taken for it.
            version=max(newest, lost) + 1,
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
