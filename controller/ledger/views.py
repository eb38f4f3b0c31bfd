"""Views of the ledger for the shell: status, counts, payloads. Pure functions."""

from dataclasses import dataclass, field

from controller.ledger.enums import Kind, Phase, Role
from controller.ledger.state.state import State
from paceline.errors import plural
from paceline.ids import Step, TaskId, Version

Ref = tuple[TaskId, int]  # (task id, attempt)


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


def due_checkpoint(state: State) -> Step:
    """Step at or after which the next checkpoint is due; 0 once the last one is recorded."""
    v = state.versions
    if state.phase is Phase.SUSPENDED:
        return Step(0)
    if state.phase in (Phase.STOPPING, Phase.SUSPENDING):
        end = Step(v.step + (1 if state.steps.open else 0))
        return end if end > v.checkpoint.step else Step(0)
    newest, every, steps = v.checkpoint.step, state.run.checkpoint_every, state.run.steps
    regular = Step(0 if newest >= steps else min((newest // every + 1) * every, steps))
    # A request stays until it is fulfilled, also if the replica that was writing has died.
    return min(v.requested, regular) if v.requested > newest else regular


def is_leased(state: State, worker_id: str, task_id: TaskId, attempt: int) -> bool:
    """True if this attempt at the task is leased to this worker."""
    task = state.tasks.records.get(task_id)
    return task is not None and task.leased_as(attempt, worker_id)


def counts(state: State) -> TaskCounts:
    t = state.tasks
    return TaskCounts(
        dispatched=t.cursor,
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
    seats = state.fleet.seats
    # A mesh that broke in the turn of generation is formed again in the next one.
    generates = bool(seats.by_name) and seats.turn is Role.ROLLOUT
    return "running" if generates or state.fleet.whole_mesh else "waiting"


def at_its_end(state: State) -> bool:
    """True once the last step of a run that has not ended is committed."""
    return state.run_spec is not None and not state.ended and state.versions.step >= state.run.steps


def beside_steps(state: State) -> str:
    """Says what the run does that no committed step shows; empty: nothing."""
    found = []
    for step, round_ in state.evals.rounds.items():
        done = "" if state.run.recorded else f", {round_.rows - round_.open} done"
        found.append(f"evaluation after step {step} ({plural(round_.rows, 'prompt')}{done})")
    if at_its_end(state) and state.versions.checkpoint.step < state.versions.step:
        found.append(f"checkpoint of step {state.versions.step}")
    return " and ".join(found)


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
    return {task.ref for task in state.tasks.records.values() if task.group is not None}


def may_need(state: State, ref: Ref) -> bool:
    """True if a step may still need this payload, or its group may still be accepted."""
    task = state.tasks.records.get(ref[0])
    return task is not None and task.ref == ref and (task.leased or task.group is not None)
