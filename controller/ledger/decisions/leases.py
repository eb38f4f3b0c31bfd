"""Decisions about tasks: leasing, acceptance, return, expiry.

- A task is leased only if tokens of the worker's weights will be fresh enough at the step that it
  queues for. The count in front of it is derived from the tasks, so it cannot leak. How long its
  group then takes is no reason to drop it, unless the run drops late groups.
- Only the attempt that runs may finish a task. A late submission of another one gets the verdict on
  what became of the task.
- A failed attempt counts towards quarantine, and so does the death of an owner that held nothing
  else; at ``max_attempts`` the task is quarantined.
- A task with which two owners have died is suspect. It goes to a worker that holds nothing else,
  one worker at a time, which runs empty for it. This isolates the cause of the deaths: tasks that
  were only held beside it are finished, and the rest of the fleet goes on.
"""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from typing import NamedTuple

from controller.ledger import events as ev
from controller.ledger.decisions.commands import CommandRefused, Decider, command, of_worker
from controller.ledger.decisions.steps import settle_step
from controller.ledger.enums import (
    DropReason,
    EmptyReason,
    Kind,
    Phase,
    ReleaseReason,
    ReturnKind,
    Role,
    VerdictCode,
)
from controller.ledger.limits import dispatch_limit
from controller.ledger.specs import HELD_OUT, GroupMeta, LeasedTask
from controller.ledger.state.fleet import Worker
from controller.ledger.state.state import State
from controller.ledger.state.tasks import Task, TaskState
from controller.ledger.state.token_ages import too_old
from paceline.dataset.data_order import task_seed
from paceline.errors import RefusalCode
from paceline.evaluation import row_score
from paceline.ids import Step, TaskId, Version

_NUMBER = "(0|[1-9][0-9]{0,17})"
_TASK_ID = re.compile(rf"t{_NUMBER}|e{_NUMBER}\.{_NUMBER}")


class LeaseResult(NamedTuple):
    leases: tuple[LeasedTask, ...]
    empty_reason: EmptyReason = EmptyReason.UNSPECIFIED


class Verdict(NamedTuple):
    code: VerdictCode
    message: str = ""


@of_worker
def lease(
    d: Decider, now: float, worker: Worker, lease_seq: int, max_tasks: int, loaded_version: Version
) -> LeaseResult:
    """Idempotent by ``lease_seq``: only the newest is remembered."""
    state = d.state
    if lease_seq == worker.lease_seq and worker.lease_reply:
        return LeaseResult(worker.lease_reply)
    if lease_seq <= worker.lease_seq:
        raise CommandRefused(
            RefusalCode.INVALID, f"lease_seq {lease_seq} is older than {worker.lease_seq}"
        )
    if reason := _not_eligible(state, worker):
        return LeaseResult((), reason)
    # The weights of a commit that Redis has lost, or of an outvoted replica, do not count: others
    # are on their way. A recorded row waits for no weights.
    newest = state.versions.version
    usable = loaded_version <= newest and loaded_version != worker.withdrawn_version
    loaded = newest if state.run.recorded else loaded_version if usable else Version(-1)
    picked = _pick(state, worker, loaded, max_tasks)
    if isinstance(picked, EmptyReason):
        return LeaseResult((), picked)
    leases = tuple(_lease_of(state, task) for task in picked)
    d.emit(ev.TasksLeased(*worker.who, lease_seq, leases, loaded))
    return LeaseResult(leases)


def _not_eligible(state: State, worker: Worker) -> EmptyReason | None:
    """Reason why the worker gets no task, whatever tasks there are; None: it may get some."""
    if state.phase is not Phase.OPEN or worker.leaving:
        return EmptyReason.STOPPED
    if state.paused:
        return EmptyReason.PAUSED
    if worker.spare:
        return EmptyReason.SPARE
    if state.fleet.shuns(worker):
        return EmptyReason.BLOCKED
    if not state.fleet.seated(worker):
        return EmptyReason.PARKED
    holds_suspect = not worker.held.keys().isdisjoint(state.tasks.suspects)
    return EmptyReason.ISOLATED if holds_suspect else None


def _pick(state: State, worker: Worker, loaded: Version, most: int) -> list[Task] | EmptyReason:
    """At most ``most`` tasks for the worker, at least one; or why there is none."""
    trainable = admissible(state, loaded)
    if state.tasks.suspects and _takes_suspects(state, worker):
        waiting = (_pending_evals(state, loaded), _pending_train(state) if trainable > 0 else ())
        if suspect := next((t for t in chain(*waiting) if t.suspect), None):
            return EmptyReason.ISOLATED if worker.held else [suspect]
    evals = (t for t in _pending_evals(state, loaded) if not t.suspect)
    tasks = list(islice(evals, most))
    if (rest := min(most - len(tasks), trainable)) > 0:
        tasks.extend(_train_tasks(state, rest))
    if tasks:
        return tasks
    waits = loaded < 0 or admissible(state, state.versions.version) > 0
    return EmptyReason.WEIGHTS if waits else EmptyReason.STALENESS


def admissible(state: State, loaded_version: Version) -> int:
    """Number of training tasks that may be leased to an engine that serves ``loaded_version``."""
    if loaded_version < 0:
        return 0
    run = state.run
    served = state.versions.step_of(loaded_version)
    limit = dispatch_limit(served, run.max_staleness, run.groups_per_step)
    rest = min(limit, run.steps * run.groups_per_step) - state.tasks.position
    # Later steps may have groups reserved for them. They train after one that misses a group.
    missing = state.steps.missing(Step(served + run.max_staleness + 1), run.groups_per_step)
    return max(rest, missing - len(state.tasks.ready) - state.tasks.leased)


def _takes_suspects(state: State, worker: Worker) -> bool:
    """The first worker by name that has weights takes them. Nothing that changes with every step
    may decide it: a worker that is excused in between would get other tasks, and never run empty.
    """

    def able(other: Worker) -> bool:
        loaded = state.run.recorded or other.loaded_version >= 0
        return loaded and state.fleet.may_lease(other) and state.fleet.seated(other)

    # Of a large fleet nearly every request ends this at the first worker that it looks at.
    living = state.fleet.living(Role.ROLLOUT)
    before = (w for w in living if w.worker_id < worker.worker_id)
    return able(worker) and not any(map(able, before))


def _pending_evals(state: State, loaded_version: Version) -> Iterator[Task]:
    for round_ in state.evals.rounds.values():
        if loaded_version < state.versions.version_of(round_.step):
            return
        # A lease must not look at the whole fleet: a round of one slow row lasts for many steps.
        others = round_.pending and round_.version not in (None, loaded_version)
        if others and _serves(state, round_.version):
            continue
        for row in round_.pending:
            yield state.tasks.records[TaskId(f"e{round_.step}.{row}")]


def _serves(state: State, version: Version | None) -> bool:
    """True if a worker that may lease tasks has this version."""
    served = (w for w in state.fleet.living(Role.ROLLOUT) if w.loaded_version == version)
    return any(state.fleet.may_lease(w) and state.fleet.seated(w) for w in served)


def _pending_train(state: State) -> Iterator[Task]:
    return (state.tasks.records[TaskId(f"t{ordinal}")] for ordinal in state.tasks.pending)


def _train_tasks(state: State, count: int) -> list[Task]:
    """Tasks that were dispatched before, then new ones."""
    tasks = list(islice((t for t in _pending_train(state) if not t.suspect), count))
    cursor = state.tasks.cursor
    new = range(cursor, cursor + count - len(tasks))
    return tasks + [Task(TaskId(f"t{ordinal}"), Kind.TRAIN, ordinal) for ordinal in new]


def _lease_of(state: State, task: Task) -> LeasedTask:
    """The next try at the task."""
    run = state.run
    again = task.task_id, task.attempt + 1, task.kind
    if task.kind is Kind.EVAL:
        of, index = state.evals.rounds[task.eval_step].place(task.ordinal)
        # A prompt of a named set has the same random numbers in every round: their luck does not
        # differ.
        drawn = task.task_id if of.name == HELD_OUT else TaskId(f"{of.name}/{index}")
        eval_set = "" if of.name == HELD_OUT else of.name
        return LeasedTask(*again, 0, index, task_seed(run.seed, drawn), eval_set)
    dataset_pass, index = run.order.place(task.ordinal)
    return LeasedTask(*again, dataset_pass, index, task_seed(run.seed, task.task_id))


@of_worker
def accept(d: Decider, now: float, worker: Worker, group: GroupMeta) -> Verdict:
    """Idempotent by (task_id, attempt)."""
    state = d.state
    task = state.tasks.records.get(group.task_id)
    if task is None:
        return _finished(state, group.task_id, group.attempt)
    if problem := _implausible(state, task, group):
        return Verdict(VerdictCode.INVALID, problem)
    if not task.leased_as(group.attempt, worker.worker_id):
        return _not_running(task, group.attempt)
    if task.kind is Kind.EVAL:
        round_ = state.evals.rounds[task.eval_step]
        version = round_.counted_as(group.min_version, group.max_version)
        solved_at = round_.place(task.ordinal)[0].solved_at
        rewards = group.rewards or (group.reward_mean,) * group.samples
        lengths = group.lengths or (0,)
        row = row_score(rewards, group.answers, lengths, group.truncated, solved_at)
        d.emit(ev.EvalTaskDone(*task.ref, worker.worker_id, version, row))
        d.settle_evals(now)
        return Verdict(VerdictCode.ACCEPTED)
    if found := too_old(state, group, state.next_step):
        d.emit(ev.TaskDropped(*task.ref, *found, VerdictCode.TOO_STALE, group))
        return Verdict(VerdictCode.TOO_STALE, found[1])
    if state.run.filter_uninformative and group.reward_std == 0.0:
        why = DropReason.UNINFORMATIVE, "all rewards are equal"
        d.emit(ev.TaskDropped(*task.ref, *why, group=group))
        return Verdict(VerdictCode.ACCEPTED, "uninformative: its rewards are all equal; dropped")
    d.emit(ev.GroupAccepted(worker.worker_id, group))
    settle_step(d, now)
    return Verdict(VerdictCode.ACCEPTED)


def _implausible(state: State, task: Task, group: GroupMeta) -> str:
    if not 0 <= group.min_version <= group.max_version <= state.versions.version:
        return (
            f"versions {group.min_version} to {group.max_version} are not within "
            f"0 to {state.versions.version}"
        )
    if task.kind is Kind.TRAIN and group.samples != state.run.group_size:
        return f"{group.samples} samples; a group has {state.run.group_size}"
    if task.kind is Kind.EVAL:
        of, _ = state.evals.rounds[task.eval_step].place(task.ordinal)
        if group.samples != of.samples:
            return f"{group.samples} samples; {of.name} takes {of.samples} of a prompt"
    if group.tokens < 1:
        return "no token to train on"
    return ""


@of_worker
def give_back(
    d: Decider,
    now: float,
    worker: Worker,
    task_id: TaskId,
    attempt: int,
    kind: ReturnKind,
    reason: str,
    detail: str = "",
) -> Verdict:
    task = d.state.tasks.records.get(task_id)
    if task is None:
        return _finished(d.state, task_id, attempt)
    if not task.leased_as(attempt, worker.worker_id):
        return _not_running(task, attempt)
    if kind is ReturnKind.DROP:
        d.emit(ev.TaskDropped(*task.ref, reason, detail))
    elif kind is ReturnKind.FAILED:
        release(d, task, worker, reason, counts=True, detail=detail)
    else:
        release(d, task, worker, ReleaseReason.HAND_BACK, counts=False, detail=reason)
    d.settle_evals(now)
    return Verdict(VerdictCode.ACCEPTED)


@command
def expire(d: Decider, now: float, task_id: TaskId, attempt: int) -> None:
    """The owner no longer names this lease. No effect if the task has moved on."""
    task = d.state.tasks.records.get(task_id)
    if task is not None and task.leased and task.attempt == attempt:
        owner = d.state.fleet.workers[task.owner]
        release(d, task, owner, ReleaseReason.LEASE_EXPIRED, counts=False)


def release(
    d: Decider,
    task: Task,
    worker: Worker,
    reason: str,
    *,
    counts: bool,
    detail: str = "",
    suspected: bool = False,
) -> None:
    """Ends the lease without a group: the task is queued first, or quarantined."""
    if counts and len(task.failures) + 1 >= d.state.run.max_attempts:
        tries = [*task.failures, f"{worker.worker_id}: {reason} {detail}".strip()]
        told = (f"{n} times {text}" if n > 1 else text for text, n in Counter(tries).items())
        d.emit(ev.TaskDropped(*task.ref, DropReason.QUARANTINED, "; ".join(told)))
    else:
        d.emit(ev.TaskReleased(*task.ref, worker.worker_id, reason, counts, detail, suspected))


def _not_running(task: Task, attempt: int) -> Verdict:
    if not 1 <= attempt <= task.attempt:
        return Verdict(VerdictCode.UNKNOWN_TASK, f"{task.task_id} was never tried {attempt} times")
    if task.group is not None and attempt == task.attempt:
        return Verdict(VerdictCode.DUPLICATE, "this attempt was accepted before")
    if task.state is TaskState.PENDING:
        return Verdict(VerdictCode.SUPERSEDED, "this lease is over; the task waits for another try")
    return Verdict(VerdictCode.SUPERSEDED, f"the task is at attempt {task.attempt}")


def _finished(state: State, task_id: TaskId, attempt: int) -> Verdict:
    if (outcome := state.tasks.outcomes.get(task_id)) is not None:
        last, verdict = outcome
        if attempt == last:
            return Verdict(verdict, "this attempt is finished")
        if not 1 <= attempt < last:
            return Verdict(VerdictCode.UNKNOWN_TASK, f"{task_id} was never tried {attempt} times")
    elif not _was_dispatched(state, task_id):
        return Verdict(VerdictCode.UNKNOWN_TASK, f"there is no task {task_id!r}")
    return Verdict(VerdictCode.SUPERSEDED, "the task is finished")


def _was_dispatched(state: State, task_id: TaskId) -> bool:
    if (parsed := _TASK_ID.fullmatch(task_id)) is None:
        return False
    ordinal, step, row = parsed.groups()
    if ordinal is not None:
        return int(ordinal) < state.tasks.cursor
    return int(row) < state.evals.rows_of(Step(int(step)))
