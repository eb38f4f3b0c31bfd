"""Decisions about steps: opening, resharding, voting, committing, checkpoints. A step opens when
``groups_per_step`` groups are ready and the mesh is whole. It commits when every member of the
epoch has voted with the same digest of the weights. If a member is lost, the others take over its
groups in a new epoch; no replica ever applies an update that is not committed."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from controller.ledger import events as ev
from controller.ledger.decisions.commands import CommandRefused, Decider, of_worker
from controller.ledger.decisions.links import send_again
from controller.ledger.decisions.mesh import lose_member, mend_mesh
from controller.ledger.enums import Phase, Role, VoteOutcome
from controller.ledger.specs import StatValue, StepSettings
from controller.ledger.state.fleet import Mesh, Worker
from controller.ledger.state.state import State
from controller.ledger.state.steps import OpenStep, assign_shards
from controller.ledger.state.token_ages import too_old
from controller.ledger.step_metrics import step_metrics
from paceline.errors import RefusalCode
from paceline.ids import MeshEpoch, Step, TaskId, Version
from paceline.observe.vocabulary import MeshEnd


def settle_step(d: Decider, now: float) -> None:
    """Opens the next step if everything for it is there."""
    s = d.state
    mesh = s.fleet.whole_mesh
    if s.phase is not Phase.OPEN or s.paused or s.steps.open or mesh is None:
        return
    if not all(map(s.fleet.seated, s.fleet.members())):
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
    shards = assign_shards(s.costs(groups), mesh.names)
    settings = s.steps.settings_of(step)
    if settings is None:
        settings = StepSettings(s.run.lr.at(step, s.run.steps), s.run.token_age)
    again = replay is not None
    d.emit(ev.StepOpened(step, s.versions.version, mesh.epoch, groups, shards, again, settings))


def missing_groups(s: State) -> int:
    """Groups that must become ready before the next step can open."""
    kept = s.steps.replay.get(Step(s.versions.step + 1), ())
    return max(0, s.run.groups_per_step - len(kept) - len(s.tasks.ready))


def _choose(d: Decider, step: Step, count: int) -> tuple[TaskId, ...] | None:
    """The ``count`` ready groups that were leased first; None if there are too few. Tasks are
    numbered in the order of their first lease, and a group that took long, or several attempts,
    goes before those that were leased later. Groups that are too old for ``step`` are dropped."""
    s = d.state
    if len(s.tasks.ready) < count:
        return None
    for task_id in list(s.tasks.ready):
        group = s.meta(task_id)
        if found := too_old(s, group, step):
            d.emit(ev.TaskDropped(task_id, group.attempt, *found, group=group))
    if len(s.tasks.ready) < count:
        return None
    oldest_first = sorted(s.tasks.ready, key=lambda t: s.tasks.records[t].ordinal)
    return tuple(oldest_first[:count])


class VoteResult(NamedTuple):
    outcome: VoteOutcome
    version: Version = Version(-1)  # Version of the state after a commit


@of_worker
def vote(
    d: Decider,
    now: float,
    worker: Worker,
    step_number: Step,
    mesh_epoch: MeshEpoch,
    digest: str,
    stats: Mapping[str, StatValue],
    term: int = 0,
    observed: Mapping[str, float] = MappingProxyType({}),
) -> VoteResult:
    """A replica holds the reduced gradients of the step that ``term`` opened (0: not known), on
    weights of ``digest``. Idempotent by (step, mesh_epoch). ``observed``: as for step_metrics."""
    s = d.state
    commit = s.steps.committed(step_number, mesh_epoch)
    if commit is not None and worker.who in commit.members:
        return VoteResult(VoteOutcome.COMMITTED, commit.version)
    mesh, step = s.fleet.mesh, attempt_at(s, worker, step_number, mesh_epoch)
    if mesh is None or step is None:
        return VoteResult(VoteOutcome.RETRY)
    if term != step.term and 0 not in (term, step.term):
        # The journal has lost that opening, and the step has other groups now. Gradients of both
        # may be mixed.
        detail = f"{worker.worker_id} votes for step {step.step} as term {term} opened it"
        lose_member(d, MeshEnd.LOST_COMMIT, detail)
        d.settle_fleet(now)
        return VoteResult(VoteOutcome.RETRY)
    if worker.worker_id in step.votes:
        return VoteResult(VoteOutcome.PENDING)
    d.emit(ev.VoteCast(*worker.who, step.step, mesh_epoch, digest, stats))
    if len(step.votes) < len(mesh.members):
        return VoteResult(VoteOutcome.PENDING)
    wrong = diverged(mesh, step)
    if wrong:
        detail = ", ".join(f"{w}={step.votes[w].digest}" for w in step.votes)
        detail = f"weights before step {step.step}: {detail}"
        d.emit(ev.MeshBroken(mesh.epoch, MeshEnd.DIVERGED, detail, wrong, now))
        _disown_output(d, step.version, wrong)
        mend_mesh(d)  # no member is suspect: the believed ones send their state to the others
        d.settle_fleet(now)
        return VoteResult(VoteOutcome.RETRY)
    _void(d, step.version, digest)  # of a replica that died before it could be outvoted
    metrics = step_metrics(s, step, now, observed)
    d.emit(ev.StepCommitted(step.step, Version(s.versions.version + 1), metrics, now))
    d.settle_fleet(now)
    return VoteResult(VoteOutcome.COMMITTED, s.versions.version)


def attempt_at(s: State, worker: Worker, step: Step, mesh_epoch: MeshEpoch) -> OpenStep | None:
    """The open step, if ``worker`` has a part in it and speaks of this very attempt."""
    found, mesh = s.steps.open, s.fleet.whole_mesh
    if found is None or mesh is None or mesh.rank(*worker.who) < 0:
        return None
    same = (step, mesh_epoch, mesh_epoch) == (found.step, found.mesh_epoch, mesh.epoch)
    return found if same else None


def diverged(mesh: Mesh, step: OpenStep) -> tuple[str, ...]:
    """Members outvoted about what the weights are; in a tie the lowest rank is believed."""
    digests = [step.votes[name].digest for name in mesh.names]
    counts = Counter(digests)
    if len(counts) == 1:
        return ()
    most = max(counts.values())
    believed = next(x for x in digests if counts[x] == most)
    return tuple(w for w, digest in zip(mesh.names, digests, strict=True) if digest != believed)


def _disown_output(d: Decider, version: Version, wrong: Collection[str]) -> None:
    """Void what outvoted replicas wrote and published of ``version``."""
    s = d.state
    _void(d, version, s.versions.digests[version])
    for worker_id in wrong:
        # In the order in which they got their links, as all events name them.
        below = {w.worker_id for w in s.fleet.all_below(s.fleet.workers[worker_id])}
        receivers = tuple(receiver for receiver in s.fleet.links if receiver in below)
        if receivers:
            d.emit(ev.WeightsWithdrawn(worker_id, version, receivers))
            send_again(d, receivers)


def _void(d: Decider, version: Version, believed: str) -> None:
    """Voids checkpoints of ``version`` whose weights are not those of the digest ``believed``."""
    for record in list(d.state.versions.checkpoints):
        if record.version == version and record.digest not in ("", believed):
            d.emit(ev.CheckpointVoided(record.worker_id, record.step, version, record.path))


@dataclass(frozen=True, slots=True)
class CheckpointVerdict:
    useless: tuple[str, ...] = ()
    """Directories that are never restored: this one if it is refused, and voided ones."""
    older: tuple[str, ...] = ()
    """Recorded checkpoints that no rollback needs any more, oldest first."""
    needed: int = 1  # Number of recorded checkpoints that a rollback may still need
    settled: Step = Step(0)  # No checkpoint of an earlier step is ever recorded any more
    recorded: tuple[str, ...] = ()  # Directories of all recorded checkpoints


@of_worker
def record_checkpoint(
    d: Decider,
    now: float,
    worker: Worker,
    step: Step,
    version: Version,
    path: str,
    size_bytes: int = 0,
    seconds: float = 0.0,
    digest: str = "",
) -> CheckpointVerdict:
    """``digest``: of the weights, as in votes. Idempotent by (step, version)."""
    s, v = d.state, d.state.versions
    member = s.fleet.in_mesh(worker)
    # A replica that leaves, or was declared dead and is back, wrote it while it was a member.
    wrote = member or worker.leaving or worker.state_version >= version
    if worker.role is not Role.POLICY or not wrote:
        raise CommandRefused(
            RefusalCode.INVALID,
            f"{worker.worker_id} is no member of the mesh: it has no state to save",
        )
    recorded = {k.path for k in v.checkpoints}
    refused = CheckpointVerdict(useless=() if path in recorded else (path,))
    # The replica wrote a state of a version at which it was outvoted, or before; or other weights
    # than those that the replicas agreed on. What it committed with the others since is right.
    disputed = version <= worker.diverged_version and worker.state_version != version
    outvoted = disputed or digest != v.digests.get(version, digest)
    known = next((k.path for k in v.checkpoints if (k.step, k.version) == (step, version)), "")
    outdated = known != path if known else step <= v.checkpoint.step
    if not v.survives(version) or v.step_of(version) != step or outdated or outvoted:
        return refused
    if not known:
        written = (worker.worker_id, step, version, path, size_bytes, seconds, digest)
        d.emit(ev.CheckpointRecorded(*written))
        d.settle_fleet(now)
    # The one that all replicas agree on is kept until a newer one is agreed on.
    last = min(step, v.agreed.step)
    older = tuple(k.path for k in v.checkpoints if k.step < last and k.path != path)
    needed = sum(last <= k.step <= step for k in v.checkpoints)
    return CheckpointVerdict(
        tuple(p for p in v.voided if p != path),
        older,
        needed,
        # An agreed checkpoint is never voided, and a record of an earlier step is refused from then
        # on.
        settled=v.agreed.step,
        recorded=tuple(k.path for k in v.checkpoints),
    )
