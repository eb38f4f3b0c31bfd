"""Decisions about steps: opening, resharding, voting, committing, checkpoints. A step opens when
``groups_per_step`` groups are ready and the mesh is whole. It commits when every member of the
epoch has voted with the same digest of the weights. If a member is lost, the others take over its
groups in a new epoch; no replica ever applies an update that is not committed."""

from collections import Counter
from collections.abc import Collection

from controller.ledger import commands as cmd
from controller.ledger import events as ev
from controller.ledger.decisions.decider import Decider, decides
from controller.ledger.decisions.links import take_back
from controller.ledger.enums import Phase, Role, VoteOutcome
from controller.ledger.specs import GroupMeta, StepSettings
from controller.ledger.state.fleet import Mesh, Worker
from controller.ledger.state.state import State
from controller.ledger.state.steps import OpenStep, assign_shards
from controller.ledger.state.token_ages import too_old
from controller.ledger.state.versions import Checkpoint
from controller.ledger.views.metrics import step_metrics
from paceline.errors import RefusalCode
from paceline.ids import Step, TaskId, Version
from paceline.observe.vocabulary import MeshEnd


def settle_step(d: Decider, now: float) -> None:
    """Opens the next step if everything for it is there."""
    s = d.state
    mesh = s.fleet.whole_mesh
    if s.phase is not Phase.OPEN or s.paused or s.steps.open or mesh is None:
        return
    step = Step(s.versions.step + 1)
    if step > s.run.steps:
        return
    replay = s.steps.replay.get(step)
    kept = replay or ()
    missing = s.run.groups_per_step - len(kept)
    chosen = _choose(d, step, missing) if missing else ()
    if chosen is None:
        return
    groups = (*kept, *chosen)
    members = [m.worker_id for m in mesh.members]
    shards = assign_shards([_cost(s, task_id) for task_id in groups], members)
    settings = s.steps.settings_of(step)
    if settings is None:
        settings = StepSettings(s.run.lr.at(step, s.run.steps), s.run.token_age)
    again = replay is not None
    d.emit(ev.StepOpened(step, s.versions.version, mesh.epoch, groups, shards, again, settings))


def _choose(d: Decider, step: Step, count: int) -> tuple[TaskId, ...] | None:
    """The ``count`` ready groups that were leased first; None if there are too few. Tasks are
    numbered in the order of their first lease, and a group that took long, or several attempts,
    goes before those that were leased later. Groups that are too old for ``step`` are dropped."""
    s = d.state
    if len(s.tasks.ready) < count:
        return None
    for task_id in list(s.tasks.ready):
        group = _meta(s, task_id)
        if found := too_old(s, group, step):
            d.emit(ev.TaskDropped(task_id, group.attempt, *found, group=group))
    if len(s.tasks.ready) < count:
        return None
    oldest_first = sorted(s.tasks.ready, key=lambda t: s.tasks.records[t].ordinal)
    return tuple(oldest_first[:count])


def reshard(d: Decider, mesh: Mesh) -> None:
    """The open step goes on in ``mesh``: members keep their groups and take over the lost ones."""
    s = d.state
    step = s.steps.open
    assert step is not None
    costs = [_cost(s, task_id) for task_id in step.groups]
    shards = assign_shards(costs, [m.worker_id for m in mesh.members], step.shards)
    d.emit(ev.StepResharded(step.step, mesh.epoch, shards))


def _meta(s: State, task_id: TaskId) -> GroupMeta:
    group = s.tasks.records[task_id].group
    assert group is not None
    return group


def _cost(s: State, task_id: TaskId) -> int:
    group = _meta(s, task_id)
    return group.tokens + group.prompt_tokens * group.sequences


@decides
def vote(d: Decider, c: cmd.CastVote, now: float) -> cmd.VoteResult:
    d.caller(c.worker_id, c.incarnation)
    s = d.state
    commit = s.steps.committed(c.step, c.mesh_epoch)
    if commit is not None and (c.worker_id, c.incarnation) in commit.members:
        return cmd.VoteResult(VoteOutcome.COMMITTED, commit.version)
    step, mesh = s.steps.open, s.fleet.whole_mesh
    if (
        step is None
        or mesh is None
        or (c.step, c.mesh_epoch) != (step.step, step.mesh_epoch)
        or c.mesh_epoch != mesh.epoch
        or mesh.rank(c.worker_id, c.incarnation) < 0
    ):
        return cmd.VoteResult(VoteOutcome.RETRY)
    if c.worker_id in step.votes:
        return cmd.VoteResult(VoteOutcome.PENDING)
    d.emit(ev.VoteCast(c.worker_id, c.incarnation, c.step, c.mesh_epoch, c.digest, c.stats))
    if len(step.votes) < len(mesh.members):
        return cmd.VoteResult(VoteOutcome.PENDING)
    wrong = diverged(mesh, step)
    if wrong:
        detail = ", ".join(f"{w}={step.votes[w].digest}" for w in step.votes)
        detail = f"weights before step {step.step}: {detail}"
        d.emit(ev.MeshBroken(mesh.epoch, MeshEnd.DIVERGED, detail, wrong))
        _disown_output(d, step.version, wrong)
        d.mend_mesh(now)  # no member is suspect: the believed ones send their state to the others
        return cmd.VoteResult(VoteOutcome.RETRY)
    _commit(d, step, now)
    return cmd.VoteResult(VoteOutcome.COMMITTED, s.versions.version)


def diverged(mesh: Mesh, step: OpenStep) -> tuple[str, ...]:
    """Members outvoted about what the weights are; in a tie the lowest rank is believed."""
    digests = [step.votes[m.worker_id].digest for m in mesh.members]
    counts = Counter(digests)
    if len(counts) == 1:
        return ()
    most = max(counts.values())
    believed = next(x for x in digests if counts[x] == most)
    return tuple(
        m.worker_id for m, digest in zip(mesh.members, digests, strict=True) if digest != believed
    )


def _disown_output(d: Decider, version: Version, wrong: Collection[str]) -> None:
    """Void what outvoted replicas wrote and published of ``version``."""
    s = d.state
    for record in list(s.versions.checkpoints):
        if record.version == version and not s.versions.is_agreed(record):
            _void(d, record)
    for worker_id in wrong:
        # In the order in which they got their links, as all events name them.
        below = {w.worker_id for w in s.fleet.all_below(s.fleet.workers[worker_id])}
        receivers = tuple(receiver for receiver in s.fleet.links if receiver in below)
        if receivers:
            d.emit(ev.WeightsWithdrawn(worker_id, version, receivers))
            take_back(d, receivers)


def _void(d: Decider, record: Checkpoint) -> None:
    d.emit(ev.CheckpointVoided(record.worker_id, record.step, record.version, record.path))


def _commit(d: Decider, step: OpenStep, now: float) -> None:
    s = d.state
    (agreed,) = {vote.digest for vote in step.votes.values()}
    for record in list(s.versions.checkpoints):
        # Of a replica that died before it could be outvoted.
        if record.version == step.version and record.digest not in ("", agreed):
            _void(d, record)
    groups = [_meta(s, task_id) for task_id in step.groups]
    metrics = step_metrics(s, groups, step.votes.values(), now)
    d.emit(ev.StepCommitted(step.step, Version(s.versions.version + 1), metrics, now))
    d.settle_fleet(now)


@decides
def record_checkpoint(d: Decider, c: cmd.RecordCheckpoint, now: float) -> cmd.CheckpointVerdict:
    worker = d.caller(c.worker_id, c.incarnation)
    s = d.state
    member = s.fleet.in_mesh(c.worker_id, c.incarnation)
    # A replica that leaves, or was declared dead and is back, wrote it while it was a member.
    wrote = member or worker.leaving or worker.state_version >= c.version
    if worker.role is not Role.POLICY or not wrote:
        raise cmd.CommandRefused(
            RefusalCode.INVALID, f"{c.worker_id} is no member of the mesh: it has no state to save"
        )
    v = s.versions
    recorded = {k.path for k in v.checkpoints}
    refused = cmd.CheckpointVerdict(useless=() if c.path in recorded else (c.path,))
    if not v.survives(c.version) or v.step_of(c.version) != c.step or _outvoted(s, worker, c):
        return refused
    known = next((k for k in v.checkpoints if (k.step, k.version) == (c.step, c.version)), None)
    if known is None:
        if c.step <= v.checkpoint.step:
            return refused
        d.emit(
            ev.CheckpointRecorded(
                c.worker_id, c.step, c.version, c.path, c.size_bytes, c.seconds, c.digest
            )
        )
        d.settle_fleet(now)
    elif known.path != c.path:
        return refused
    # The one that all replicas agree on is kept until a newer one is agreed on.
    last = min(c.step, v.agreed.step)
    older = tuple(k.path for k in v.checkpoints if k.step < last and k.path != c.path)
    needed = sum(last <= k.step <= c.step for k in v.checkpoints)
    return cmd.CheckpointVerdict(
        tuple(p for p in v.voided if p != c.path),
        older,
        needed,
        # An agreed checkpoint is never voided, and a record of an earlier step is refused from then
        # on.
        settled=v.agreed.step,
        recorded=tuple(k.path for k in v.checkpoints),
    )


def _outvoted(s: State, worker: Worker, c: cmd.RecordCheckpoint) -> bool:
    """The replica wrote a state of a version at which it was outvoted, or before; or other weights
    than those that the replicas agreed on. What it committed with the others since is right."""
    committed = worker.state_version == c.version
    agreed = s.versions.digests.get(c.version, c.digest)
    return (c.version <= worker.diverged_version and not committed) or c.digest != agreed
