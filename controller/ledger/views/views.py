"""Views of the ledger for the shell: directives, plans, counts, payloads. Pure functions. The shell
turns these into messages; nothing here knows of protobuf."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from controller.ledger.enums import TRAITS, DesiredLifecycle, Kind, Lifecycle, Phase, PlanState
from controller.ledger.specs import GroupMeta, Member, MeshSpec
from controller.ledger.state.fleet import Worker
from controller.ledger.state.state import State
from controller.ledger.state.tasks import TaskState
from controller.ledger.state.token_ages import oldest_step, trained_sequences, trained_tokens
from controller.ledger.state.versions import VersionEpoch
from controller.ledger.views.group_views import reward_totals
from paceline.ids import MeshEpoch, Step, TaskId, Version

Ref = tuple[TaskId, int]  # (task id, attempt)


@dataclass(frozen=True, slots=True)
class LinkView:
    generation: int
    publisher: Member
    receiver: Member
    reload: bool = False
    tree: int = 0
    relayed: bool = False  # The publisher is a rollout worker


@dataclass(frozen=True, slots=True)
class ScorerView:
    name: str
    worker_id: str
    address: str


@dataclass(frozen=True, slots=True)
class DirectiveView:
    lifecycle: DesiredLifecycle
    mesh: MeshSpec | None
    links: tuple[LinkView, ...]
    version: Version
    cancelled: tuple[Ref, ...]  # Leases that the worker holds and that are no longer its own
    paused: bool
    checkpoint_step: Step
    """Due: a checkpoint of this step or, if that has passed, of any later one; 0 for none."""
    leave_step: bool = False
    """The run stops, and no step is open: what was begun of one is given up."""
    scorers: tuple[ScorerView, ...] = ()  # Rollout: those that are ready for requests


@dataclass(frozen=True, slots=True)
class PlanView:
    """One replica's part of the open step."""

    step: Step
    mesh_epoch: MeshEpoch
    version: Version
    next_version: Version
    shard: tuple[Ref, ...]
    groups: tuple[GroupMeta, ...]  # The groups of the shard, in its order
    suspects: frozenset[TaskId]
    """Groups of the shard with which a trainer died: each is to be computed by itself."""
    total_tokens: int  # Without those that are masked for their age
    total_sequences: int
    total_groups: int
    total_samples: int
    reward_sum: float
    reward_squares: float  # Sum of the squares of each reward's difference from the mean of all
    within_squares: float
    """Sum of the squares of each reward's difference from the mean of its group."""
    rank: int
    size: int
    version_epochs: tuple[VersionEpoch, ...]  # Newest first
    oldest_step: Step  # Tokens of states before it are masked
    lr: float
    checkpoint: bool  # A checkpoint is written after it


@dataclass(frozen=True, slots=True)
class TaskCounts:
    """Training tasks: dispatched is the sum of the others."""

    dispatched: int
    pending: int
    leased: int
    ready: int
    in_step: int
    trained: int
    dropped: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StatusView:
    run_id: str
    run_name: str
    phase: str
    """waiting, running, paused, stopping, finished or failed."""
    reason: str
    leader: str
    term: int
    step: Step
    total_steps: int
    version: Version
    mesh_epoch: MeshEpoch
    tasks: TaskCounts
    desired: dict[str, int]
    metrics: dict[str, float]
    failovers: int
    mesh_rebuilds: int
    parity_failures: int
    rollbacks: int
    checkpoint_step: Step
    samples_trained: int
    tokens_trained: int
    reward_trouble: str = ""
    """Held-out rewards fall, or the training reward is exploited; with the remedy. Empty: no."""


def directive(
    state: State, worker_id: str, incarnation: int, held: Iterable[Ref] = ()
) -> DirectiveView:
    """``held``: the leases that the worker's last report named."""
    fleet = state.fleet
    worker = fleet.current(worker_id, incarnation)
    version = state.versions.version
    cancelled = tuple(ref for ref in held if not is_leased(state, worker_id, *ref))
    if worker is None or state.ended:
        over = state.ended or _succeeded(state, worker_id, incarnation)
        lifecycle = DesiredLifecycle.STOPPED if over else DesiredLifecycle.REJOIN
        return DirectiveView(lifecycle, None, (), version, cancelled, state.paused, Step(0))
    return DirectiveView(
        lifecycle=_lifecycle(state, worker),
        mesh=fleet.whole_mesh if _is_member(state, worker) else None,
        links=_links(state, worker),
        version=version,
        cancelled=cancelled,
        paused=state.paused,
        checkpoint_step=due_checkpoint(state) if TRAITS[worker.role].mesh else Step(0),
        leave_step=state.phase in (Phase.STOPPING, Phase.SUSPENDING) and not state.steps.open,
        scorers=_scorers(state) if TRAITS[worker.role].leases else (),
    )


def _succeeded(state: State, worker_id: str, incarnation: int) -> bool:
    """Another process lives under this worker id. If this one registered again, the two would take
    the place from each other forever."""
    holder = state.fleet.workers.get(worker_id)
    return holder is not None and holder.alive and holder.incarnation != incarnation


def due_checkpoint(state: State) -> Step:
    v = state.versions
    if state.phase is Phase.SUSPENDED:
        return Step(0)
    if state.phase in (Phase.STOPPING, Phase.SUSPENDING):
        end = Step(v.step + (1 if state.steps.open else 0))
        return end if end > v.checkpoint.step else Step(0)
    regular = v.due_checkpoint(state.run.checkpoint_every, state.run.steps)
    # A request stays until a checkpoint fulfils it, also if the replica that was writing it has
    # died.
    if v.requested > v.checkpoint.step:
        return min(v.requested, regular)
    return regular


def is_leased(state: State, worker_id: str, task_id: TaskId, attempt: int) -> bool:
    """True if this attempt at the task is leased to this worker."""
    task = state.tasks.records.get(task_id)
    return task is not None and task.leased_as(attempt, worker_id)


def owns_all(state: State, worker_id: str, refs: Iterable[Ref]) -> bool:
    """True if all of these attempts are leased to this worker."""
    return all(is_leased(state, worker_id, task_id, attempt) for task_id, attempt in refs)


def _lifecycle(state: State, worker: Worker) -> DesiredLifecycle:
    if not worker.leaving:
        return DesiredLifecycle.RUNNING
    if state.phase is Phase.SUSPENDED:
        return DesiredLifecycle.STOPPED
    traits = TRAITS[worker.role]
    busy = _in_mesh(state, worker) if traits.mesh else bool(worker.held)
    # Only a scorer itself knows which requests it still answers.
    unknown = traits.serves and worker.lifecycle is not Lifecycle.STOPPED
    return DesiredLifecycle.DRAINING if busy or unknown else DesiredLifecycle.STOPPED


def _scorers(state: State) -> tuple[ScorerView, ...]:
    return tuple(ScorerView(w.scorer, w.worker_id, w.address) for w in state.fleet.scorers())


def _is_member(state: State, worker: Worker) -> bool:
    traits = TRAITS[worker.role]
    return traits.mesh and state.fleet.in_mesh(worker.worker_id, worker.incarnation)


def _in_mesh(state: State, worker: Worker) -> bool:
    """True if the mesh counts on the replica: as a member, or for the epoch after a broken one."""
    if not _is_member(state, worker):
        return False
    holds = worker.state_version == state.versions.version
    return state.fleet.whole_mesh is not None or state.steps.open is not None or holds


def _links(state: State, worker: Worker) -> tuple[LinkView, ...]:
    views = []
    for link in state.fleet.links_of(worker.worker_id):
        sender = state.fleet.current(link.publisher, link.publisher_incarnation)
        receiver = state.fleet.current(link.receiver, link.receiver_incarnation)
        if sender is not None and receiver is not None:
            relayed = TRAITS[sender.role].receives
            ends = (_end(sender), _end(receiver))
            views.append(LinkView(link.generation, *ends, link.reload, link.tree, relayed))
    return tuple(views)


def _end(worker: Worker) -> Member:
    return Member(worker.worker_id, worker.incarnation, worker.tensor_host, False)


def due_for(s: State, worker_id: str, incarnation: int, version: Version) -> Step | None:
    """The step whose held-out rows this replica is to measure with its state of ``version``; None:
    no step's. Rank 0 of the mesh does it before its next vote, so that the state is still there. If
    it dies, the next one does."""
    mesh, step = s.fleet.whole_mesh, s.versions.step
    if s.run_spec is None or not s.run.recorded or s.ended or step not in s.evals.rounds:
        return None
    if mesh is None or mesh.rank(worker_id, incarnation) != 0 or version != s.versions.version:
        return None
    return step


def plan(
    state: State, worker_id: str, incarnation: int, mesh_epoch: MeshEpoch, state_version: Version
) -> tuple[PlanState, PlanView | None]:
    """The plan, if one is open, for a replica that formed ``mesh_epoch`` and holds the state of
    ``state_version``."""
    mesh = state.fleet.whole_mesh
    formed = mesh is not None and mesh.epoch == mesh_epoch
    if formed and due_for(state, worker_id, incarnation, state_version) is not None:
        return PlanState.EVALUATE, None
    if state.ended or state.versions.step >= state.run.steps:
        return PlanState.FINISHED, None
    rank = mesh.rank(worker_id, incarnation) if mesh is not None else -1
    if mesh is None or mesh.epoch != mesh_epoch or rank < 0:
        return PlanState.EPOCH_OVER, None
    if state_version < mesh.state_version:
        # Who forms an epoch holds its state. This replica formed one whose number was lost with the
        # end of the journal and is given again.
        return PlanState.EPOCH_OVER, None
    step = state.steps.open
    if step is None or state_version != step.version:
        return PlanState.WAIT, None
    records = state.tasks.records
    metas = {task_id: g for task_id in step.groups if (g := records[task_id].group) is not None}
    groups = metas.values()
    rewards = reward_totals(groups)
    shard = step.shard(worker_id)
    return PlanState.OPEN, PlanView(
        step=step.step,
        mesh_epoch=step.mesh_epoch,
        version=step.version,
        next_version=Version(step.version + 1),
        shard=tuple((task_id, records[task_id].attempt) for task_id in shard),
        groups=tuple(metas[task_id] for task_id in shard),
        suspects=frozenset(state.steps.suspects).intersection(shard),
        total_tokens=sum(trained_tokens(state, g, step.step) for g in groups),
        total_sequences=sum(trained_sequences(state, g, step.step) for g in groups),
        total_groups=len(metas),
        total_samples=rewards.samples,
        reward_sum=rewards.total,
        reward_squares=rewards.squares,
        within_squares=rewards.within,
        rank=rank,
        size=len(mesh.members),
        version_epochs=tuple(reversed(state.versions.epochs)),
        oldest_step=oldest_step(state, step.step),
        lr=step.settings.lr,
        checkpoint=step.step % state.run.checkpoint_every == 0,
    )


def counts(state: State) -> TaskCounts:
    t = state.tasks
    return TaskCounts(
        dispatched=t.cursor - t.passed_over,
        pending=len(t.pending),
        leased=t.leased,
        ready=len(t.ready),
        in_step=t.in_step,
        trained=t.trained,
        dropped=dict(t.dropped),
    )


def phase(state: State) -> str:
    if state.phase is Phase.NONE:
        return "waiting"
    if state.phase is not Phase.OPEN:
        return str(state.phase)
    if state.paused:
        return "paused"
    return "running" if state.fleet.whole_mesh else "waiting"


def status(state: State) -> StatusView:
    spec = state.run_spec
    return StatusView(
        run_id=spec.run_id if spec else "",
        run_name=spec.run_name if spec else "",
        phase=phase(state),
        reason=state.reason,
        leader=state.leader,
        term=state.term,
        step=state.versions.step,
        total_steps=spec.steps if spec else 0,
        version=state.versions.version,
        mesh_epoch=state.fleet.mesh_epoch,
        tasks=counts(state),
        desired=dict(state.desired),
        metrics=dict(state.steps.metrics),
        failovers=state.failovers,
        mesh_rebuilds=state.fleet.mesh_rebuilds,
        parity_failures=state.fleet.parity_failures,
        rollbacks=state.versions.rollbacks,
        checkpoint_step=state.versions.checkpoint.step,
        samples_trained=state.steps.samples_trained,
        tokens_trained=state.steps.tokens_trained,
    )


def payload_ref(state: State, task_id: TaskId) -> Ref | None:
    """Key of the stored payload of an accepted group; None if there is none."""
    task = state.tasks.records.get(task_id)
    if task is None or task.kind is not Kind.TRAIN or task.group is None:
        return None
    return task_id, task.attempt


def unfinished(state: State) -> list[TaskId]:
    """Tasks that wait for a lease or are leased."""
    waiting = (TaskState.PENDING, TaskState.LEASED)
    return [task.task_id for task in state.tasks.records.values() if task.state in waiting]


def oldest_fresh(state: State, task_id: TaskId) -> tuple[Version, Version]:
    """Oldest versions of the first and of the last token with which a completion of this task would
    be trained if it ended now. In a run that trains late groups the last token decides: older ones
    may be masked, and are still what the later tokens continue."""
    versions, nothing, task = state.versions, Version(0), state.tasks.records.get(task_id)
    if task is None:
        return Version(versions.version + 1), nothing  # it is finished: no work of it is of use
    if task.kind is Kind.EVAL:
        return versions.version_of(task.eval_step), nothing
    oldest = versions.version_of(Step(max(0, state.next_step - 1 - state.run.token_age)))
    return (nothing, oldest) if state.run.trains_late else (oldest, nothing)


def live_payloads(state: State) -> set[Ref]:
    """Payloads that a step, or its repetition after a rollback, may still need. A new leader
    deletes the others: an earlier one may have died between journal and deletion."""
    return {ref for task_id in state.tasks.records if (ref := payload_ref(state, task_id))}


def may_need(state: State, ref: Ref) -> bool:
    """True if a step may still need this payload, or its group may still be accepted."""
    task = state.tasks.records.get(ref[0])
    return task is not None and task.attempt == ref[1] and (task.leased or task.group is not None)


def running_attempts(state: State) -> set[Ref]:
    """All attempts whose group may still be accepted."""
    return {(t.task_id, t.attempt) for t in state.tasks.records.values() if t.leased}
