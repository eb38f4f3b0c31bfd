"""Decisions about the mesh of the policy replicas.

- Joins and leaves of the mesh wait for the end of the open step; a death does not.
- If every epoch of a replica fails, for example because the source of the state cannot reach it, it
  is left out until it is restarted or the source is another one: it would block every other replica
  forever.
- If workers take turns, an epoch is formed only of replicas that hold their seats. In the turn of
  generation a broken mesh stays broken, and a joiner waits.
- While a living member of the mesh holds the newest state, its step goes on. If no living replica
  holds that state, the run goes back to the newest checkpoint.
"""

from controller.ledger import events as ev
from controller.ledger.decisions.commands import Decider, command, of_worker
from controller.ledger.enums import DropReason, Phase, Role
from controller.ledger.specs import Member
from controller.ledger.state.fleet import Worker
from controller.ledger.state.steps import assign_shards
from paceline.ids import MeshEpoch, Version
from paceline.observe.vocabulary import MeshEnd


@of_worker
def break_mesh(
    d: Decider, now: float, reporter: Worker, epoch: MeshEpoch, detail: str = ""
) -> None:
    """A member reports a failed collective of ``epoch``; later ones go on."""
    fleet = d.state.fleet
    mesh = fleet.whole_mesh
    if mesh is None or mesh.epoch != epoch or mesh.rank(*reporter.who) < 0:
        return
    detail = f"{reporter.worker_id}: {detail}"
    newest = d.state.versions.version
    for worker, failures in fleet.failures_after(now):
        if fleet.left_out(worker, newest, failures) and not fleet.left_out(worker, newest):
            source = mesh.members[max(0, mesh.source_rank)].worker_id
            detail += (
                f"; {failures.epochs} epochs of {worker.worker_id} and {source} failed in a row: "
                f"{worker.worker_id} is left out. Check the network between them, then restart it"
            )
    d.emit(ev.MeshBroken(mesh.epoch, MeshEnd.PEER_ERROR, detail, broken_t=now))


@command
def form_mesh(d: Decider, now: float) -> None:
    """Forms the next epoch from the living members of a broken one."""
    mesh = d.state.fleet.mesh
    # The run may have ended since the evidence was looked at.
    if mesh is not None and mesh.broken and not d.state.over:
        mend_mesh(d)
        d.settle_fleet(now)


def mend_mesh(d: Decider) -> None:
    """Forms the epoch after a broken one: at once with its survivors while a step is open. They
    keep its groups, and take over those of a lost member."""
    s = d.state
    assert s.fleet.mesh is not None and s.fleet.mesh.broken
    _abort_hopeless_step(d)
    step, newest = s.steps.open, s.versions.version
    if step is None:
        _form(d, _next_members(d) or [])
        return
    _form(d, [w for w in s.fleet.members() if not s.fleet.left_out(w, newest)])
    shards = assign_shards(s.costs(step.groups), s.fleet.mesh.names, step.shards)
    d.emit(ev.StepResharded(step.step, s.fleet.mesh.epoch, shards))


def lose_member(d: Decider, end: MeshEnd, detail: str) -> None:
    """A member of the newest epoch has left it, or has lost its state."""
    mesh = d.state.fleet.mesh
    assert mesh is not None
    if mesh.broken:
        _abort_hopeless_step(d)
    else:
        d.emit(ev.MeshBroken(mesh.epoch, end, detail))
        mend_mesh(d)


def _abort_hopeless_step(d: Decider) -> None:
    s = d.state
    step = s.steps.open
    if step is not None and not s.fleet.sources(s.versions.version):
        why = "no living member holds the state before it"
        d.emit(ev.StepAborted(step.step, why, kept=True))


def leave_step(d: Decider) -> None:
    """Gives the open step of a run that stops up. It opens again if the run goes on. The members
    meet in a new epoch, because some of them may wait in the old one's collectives."""
    s = d.state
    step, mesh = s.steps.open, s.fleet.whole_mesh
    if step is None:
        return
    goes_on = s.phase is Phase.SUSPENDING
    why = DropReason.SUSPENDED if goes_on else DropReason.RUN_ENDED
    d.emit(ev.StepAborted(step.step, why, kept=goes_on))
    if mesh is not None:
        d.emit(ev.MeshBroken(mesh.epoch, MeshEnd.MEMBERSHIP, "the run stops for now"))
        _form(d, s.fleet.members())


def settle_mesh(d: Decider) -> None:
    """Between steps: forms a new epoch if replicas are ready to join or leave."""
    s = d.state
    if s.over or s.steps.open is not None:
        return
    mesh = s.fleet.mesh
    if mesh is not None and mesh.broken and s.fleet.members():
        return  # liveness asks for form_mesh once the evidence is in
    members = _next_members(d)
    if members is None:
        return
    if mesh is not None and not mesh.broken:
        if [m.who for m in mesh.members] == [w.who for w in members]:
            return
        ending = s.phase in (Phase.STOPPING, Phase.SUSPENDING)
        if s.fleet.sources(s.versions.version) and (ending or s.versions.step >= s.run.steps):
            return  # the last checkpoint needs no new member
        d.emit(ev.MeshBroken(mesh.epoch, MeshEnd.MEMBERSHIP))
    _form(d, members)


def _next_members(d: Decider) -> list[Worker] | None:
    """Members of the next epoch in rank order; None: the mesh stays as it is for now."""
    s = d.state
    staying = s.fleet.members()
    if not s.fleet.may_form:
        return None
    names = {w.worker_id for w in staying}
    others = sorted(
        (w for w in s.fleet.living(Role.POLICY) if w.worker_id not in names),
        key=lambda w: w.worker_id,
    )
    newest = s.versions.version
    able = [w for w in [*staying, *others] if w.joinable and s.fleet.seated(w)]
    joining = [w for w in able if not s.fleet.left_out(w, newest) and not s.fleet.shuns(w)]
    if any(w.state_version == newest for w in joining):
        return joining
    holders = [w for w in [*staying, *others] if w.state_version == newest]
    if not holders:
        return joining
    # The only replicas with the state are leaving or not ready. A leaving one stays until another
    # has received it; for one that is coming the others wait.
    going = (w for w in holders if w.leaving or s.fleet.shuns(w))
    leaving = next((w for w in going if s.fleet.seated(w)), None)
    return None if leaving is None else [leaving, *joining]


def _form(d: Decider, workers: list[Worker]) -> None:
    s = d.state
    if not workers:
        return
    newest = s.versions.version
    restore = all(w.state_version != newest for w in workers)
    if restore:
        roll_back(d)
    version = s.versions.version
    members = tuple(
        Member(*w.who, w.tensor_host, needs_state=not restore and w.state_version != version)
        for w in workers
    )
    source = next((r for r, w in enumerate(workers) if w.state_version == version), -1)
    epoch, path = MeshEpoch(s.fleet.mesh_epoch + 1), s.versions.checkpoint.path if restore else ""
    d.emit(ev.MeshFormed(epoch, members, version, s.versions.step, source, restore, path))


def roll_back(d: Decider) -> None:
    """Goes back to the newest checkpoint, unless that is done already."""
    s, checkpoint, newest = d.state, d.state.versions.checkpoint, d.state.versions.version
    lost = max((w.diverged_version for w in s.fleet.workers.values()), default=Version(-1))
    if newest == s.versions.restore_version and lost < newest:
        return
    # A worker may still hold a lost commit, or wrong weights of the checkpoint's version: its
    # version must not be given to another state.
    unused = Version(max(newest, lost) + 1)
    d.emit(ev.RolledBack(checkpoint.step, unused, s.versions.step, newest, checkpoint.path))
