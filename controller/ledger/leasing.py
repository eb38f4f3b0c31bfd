"""Tasks out, groups in: leasing, acceptance, return, expiry.

- A task is leased only if tokens of the worker's weights will be fresh enough at the step it
  queues for. The count in front of it is derived from the tasks, so it cannot leak.
- Only the current owner's current attempt may finish a task. Everyone else learns what became of it.
- A try that failed or killed its owner counts; at ``max_attempts`` the task is quarantined.
"""

from __future__ import annotations

from controller.ledger.commands import (
    AcceptGroup,
    ExpireLease,
    GroupFacts,
    Kind,
    LeasedTask,
    LeaseResult,
    LeaseTasks,
    Refused,
    ReturnTask,
    Verdict,
)
from controller.ledger.core import Decider
from controller.ledger.events import (
    EvalTaskDone,
    GroupAccepted,
    TaskDropped,
    TaskReleased,
    TasksLeased,
)
from controller.ledger.fleet import Worker
from controller.ledger.state import Phase, State
from controller.ledger.stepping import settle_step
from controller.ledger.tasks import Stand, Task
from paceline.order import task_row, task_seed


def lease(d: Decider, c: LeaseTasks, now: float) -> LeaseResult:
    worker = d.caller(c.worker_id, c.incarnation)
    state = d.state
    if c.lease_seq == worker.lease_seq and worker.lease_reply:
        return LeaseResult(worker.lease_reply)
    if c.lease_seq <= worker.lease_seq:
        raise Refused("invalid", f"lease_seq {c.lease_seq} is older than {worker.lease_seq}")
    if c.loaded_version > state.versions.version:
        raise Refused("invalid", f"weights {c.loaded_version} were never committed")
    if state.phase is not Phase.OPEN or worker.leaving:
        return LeaseResult((), "stopped")
    if state.paused:
        return LeaseResult((), "paused")
    leases = _eval_leases(state, c.loaded_version, c.max_tasks)
    rest = c.max_tasks - len(leases)
    admitted = admissible(state, c.loaded_version)
    if rest > 0 and admitted > 0:
        leases.extend(_train_leases(state, min(rest, admitted)))
    if not leases:
        newest = admissible(state, state.versions.version)
        return LeaseResult((), "weights" if c.loaded_version < 0 or newest > 0 else "staleness")
    event = TasksLeased(c.worker_id, c.incarnation, c.lease_seq, tuple(leases))
    d.emit(event)
    return LeaseResult(event.leases)


def admissible(state: State, loaded_version: int) -> int:
    """How many training tasks may be leased to an engine that serves ``loaded_version``."""
    if loaded_version < 0:
        return 0
    run = state.run
    fresh_for = state.versions.step_of(loaded_version) + run.max_staleness + 1
    return min(fresh_for, run.steps) * run.groups_per_step - state.tasks.position


def _eval_leases(state: State, loaded_version: int, limit: int) -> list[LeasedTask]:
    leases: list[LeasedTask] = []
    for round_ in state.evals.rounds.values():
        if len(leases) >= limit or loaded_version < state.versions.version_of(round_.step):
            break
        for row in sorted(round_.pending)[: limit - len(leases)]:
            task = state.tasks.records[f"e{round_.step}.{row}"]
            seed = task_seed(state.run.seed, task.task_id)
            leases.append(LeasedTask(task.task_id, task.attempt + 1, Kind.EVAL, 0, row, seed))
    return leases


def _train_leases(state: State, count: int) -> list[LeasedTask]:
    run, book = state.run, state.tasks
    ordinals = sorted(book.pending)[:count] if book.pending else []
    again = len(ordinals)
    ordinals.extend(range(book.cursor, book.cursor + count - again))
    leases = []
    for n, ordinal in enumerate(ordinals):
        task_id = f"t{ordinal}"
        attempt = book.records[task_id].attempt + 1 if n < again else 1
        epoch, index = task_row(run.seed, ordinal, run.dataset_rows, run.shuffle)
        seed = task_seed(run.seed, task_id)
        leases.append(LeasedTask(task_id, attempt, Kind.TRAIN, epoch, index, seed))
    return leases


def accept(d: Decider, c: AcceptGroup, now: float) -> Verdict:
    d.caller(c.worker_id, c.incarnation)
    state, group = d.state, c.group
    task = state.tasks.records.get(group.task_id)
    if task is None:
        return _of_the_past(state, group.task_id, group.attempt)
    if problem := _implausible(state, task, group):
        return Verdict("invalid", problem)
    if not _holds(task, c.worker_id, group.attempt):
        return _not_yours(task, group.attempt)
    if task.kind is Kind.EVAL:
        d.emit(EvalTaskDone(task.task_id, task.attempt, c.worker_id, group.reward_mean))
        d.settle_evals(now)
        return Verdict("accepted")
    next_step = state.versions.step + (2 if state.steps.open else 1)
    staleness = state.versions.staleness(group.min_version, next_step)
    if staleness > state.run.max_staleness:
        detail = f"{staleness} steps old at the earliest step {next_step}"
        d.emit(TaskDropped(task.task_id, task.attempt, "stale", detail, verdict="too_stale"))
        return Verdict("too_stale", detail)
    if state.run.filter_uninformative and group.reward_std == 0.0:
        d.emit(TaskDropped(task.task_id, task.attempt, "uninformative", "all rewards are equal"))
        return Verdict("accepted", "uninformative: its rewards are all equal; dropped")
    d.emit(GroupAccepted(c.worker_id, group))
    settle_step(d, now)
    return Verdict("accepted")


def _implausible(state: State, task: Task, group: GroupFacts) -> str:
    if not 0 <= group.min_version <= group.max_version <= state.versions.version:
        return (
            f"versions {group.min_version} to {group.max_version} are not within "
            f"0 to {state.versions.version}"
        )
    if task.kind is Kind.TRAIN and group.sequences != state.run.group_size:
        return f"{group.sequences} completions; a group has {state.run.group_size}"
    if group.tokens < 1:
        return "no token to train on"
    return ""


def give_back(d: Decider, c: ReturnTask, now: float) -> Verdict:
    worker = d.caller(c.worker_id, c.incarnation)
    task = d.state.tasks.records.get(c.task_id)
    if task is None:
        return _of_the_past(d.state, c.task_id, c.attempt)
    if not _holds(task, c.worker_id, c.attempt):
        return _not_yours(task, c.attempt)
    if c.kind == "drop":
        d.emit(TaskDropped(task.task_id, task.attempt, c.reason, c.detail))
    elif c.kind == "failed":
        release(d, task, worker, c.reason, counts=True, detail=c.detail)
    elif c.kind == "hand_back":
        release(d, task, worker, "hand_back", counts=False, detail=c.reason)
    else:
        raise Refused("invalid", f"a task is returned as hand_back, failed or drop, not {c.kind!r}")
    d.settle_evals(now)
    return Verdict("accepted")


def expire(d: Decider, c: ExpireLease, now: float) -> None:
    task = d.state.tasks.records.get(c.task_id)
    if task is None or task.stand is not Stand.LEASED or task.attempt != c.attempt:
        return
    release(d, task, d.state.fleet.workers[task.owner], "lease_expired", counts=False)


def release(
    d: Decider, task: Task, worker: Worker, reason: str, *, counts: bool, detail: str = ""
) -> None:
    """The lease is over without a group: back to the front of the queue, or into quarantine."""
    run = d.state.run
    if counts and len(task.failures) + 1 >= run.max_attempts:
        tries = [*task.failures, f"{worker.worker_id}: {reason} {detail}".strip()]
        d.emit(TaskDropped(task.task_id, task.attempt, "quarantined", "; ".join(tries)))
        return
    d.emit(TaskReleased(task.task_id, task.attempt, worker.worker_id, reason, counts, detail))


def _holds(task: Task, worker_id: str, attempt: int) -> bool:
    return task.stand is Stand.LEASED and task.owner == worker_id and task.attempt == attempt


def _not_yours(task: Task, attempt: int) -> Verdict:
    if attempt > task.attempt or attempt < 1:
        return Verdict("unknown_task", f"{task.task_id} was never tried {attempt} times")
    if attempt == task.attempt and task.stand is not Stand.LEASED:
        if task.stand is Stand.PENDING:
            return Verdict("superseded", "this lease is over; the task waits for another try")
        return Verdict("duplicate", "this attempt was accepted before")
    return Verdict("superseded", f"the task is at attempt {task.attempt}")


def _of_the_past(state: State, task_id: str, attempt: int) -> Verdict:
    outcome = state.tasks.outcomes.get(task_id)
    if outcome is not None:
        last, verdict = outcome
        if attempt == last:
            return Verdict(verdict, "this attempt is finished")
        if attempt > last or attempt < 1:
            return Verdict("unknown_task", f"{task_id} was never tried {attempt} times")
        return Verdict("superseded", "the task is finished")
    if was_dispatched(state, task_id):
        return Verdict("superseded", "the task is finished")
    return Verdict("unknown_task", f"there is no task {task_id!r}")


def was_dispatched(state: State, task_id: str) -> bool:
    kind, rest = task_id[:1], task_id[1:]
    if kind == "t" and _number(rest):
        return int(rest) < state.tasks.cursor
    step, dot, row = rest.partition(".")
    return (
        kind == "e"
        and dot == "."
        and _number(step)
        and _number(row)
        and state.evals.knows(int(step), int(row))
    )


def _number(text: str) -> bool:
    return 0 < len(text) <= 18 and text.isascii() and text.isdigit() and text == str(int(text))
