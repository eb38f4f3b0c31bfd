"""Tasks: one prompt occurrence each. Every task ever dispatched is exactly one of: pending, leased,
ready, in a step, trained, dropped.

Tasks come from a cursor over the endless shuffled data set (``t0``, ``t1``, ...); a task that lost
its owner waits in ``pending`` and goes out before any new one, lowest ordinal first. Finished tasks
leave the memory: trained ones with the checkpoint that covers their step, dropped ones at once.
Counters remain, and the last few thousand outcomes: a repeated submission gets the first answer.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from controller.ledger.codec import TRANSIENT
from controller.ledger.enums import DROPPED_FOR_AGE, DropReason, GroupFault, Kind, VerdictCode
from controller.ledger.specs import GroupMeta, LeasedTask
from paceline.ids import Step, TaskId

_OUTCOMES_KEPT = 4096
_NO_FAILURE = (*DROPPED_FOR_AGE, DropReason.RUN_ENDED, *GroupFault)
"""Drops that say nothing about the attempts."""
SUSPECT_DEATHS = 2  # Owners that died with a task before it is isolated. One happens to every task.


class TaskState(StrEnum):
    PENDING = "pending"  # waits for a lease, after an earlier attempt
    LEASED = "leased"  # an owner works on it
    READY = "ready"  # training group accepted, waits for a step
    IN_STEP = "in_step"  # in the open step, or reserved for a step that is trained again
    TRAINED = "trained"  # its step is committed
    # dropped, and trained under a checkpoint: not in memory any more


UNFINISHED = (TaskState.PENDING, TaskState.LEASED)
TRANSITIONS: dict[TaskState | None, frozenset[TaskState | None]] = {
    None: frozenset({TaskState.LEASED, TaskState.PENDING}),
    TaskState.PENDING: frozenset({TaskState.LEASED, None}),
    TaskState.LEASED: frozenset({TaskState.PENDING, TaskState.READY, None}),
    TaskState.READY: frozenset({TaskState.IN_STEP, None}),
    TaskState.IN_STEP: frozenset({TaskState.TRAINED, TaskState.READY, TaskState.PENDING, None}),
    TaskState.TRAINED: frozenset({TaskState.IN_STEP, None}),
}  # Next states of a training task; None: not dispatched yet, dropped, or trained for good


@dataclass(slots=True)
class Task:
    compact = True

    task_id: TaskId
    kind: Kind
    ordinal: int  # Train: position in the endless data order. Eval: row of the held-out set.
    state: TaskState | None = None
    attempt: int = 0  # Newest attempt, running or not
    owner: str = ""  # Worker id of the newest attempt
    failures: tuple[str, ...] = ()  # One line for each attempt that counts towards quarantine
    deaths: int = 0  # Owners that died while they held it, by itself or with others
    group: GroupMeta | None = None
    eval_step: Step = Step(-1)

    @property
    def ref(self) -> tuple[TaskId, int]:
        """(task id, newest attempt): the key of its payload."""
        return self.task_id, self.attempt

    @property
    def leased(self) -> bool:
        """The newest attempt runs, on ``owner``."""
        return self.state is TaskState.LEASED

    def leased_as(self, attempt: int, worker_id: str) -> bool:
        """This attempt runs, on this worker."""
        return self.leased and (self.attempt, self.owner) == (attempt, worker_id)

    @property
    def suspect(self) -> bool:
        """May be the cause of its owners' deaths: leased to a worker that holds nothing else."""
        return self.deaths >= SUSPECT_DEATHS


class Moment:
    """``tasks``, encoded, as they were when this object was made."""

    def __init__(self, tasks: Iterable[Task], encode: Callable[[Task], Any]) -> None:
        self._tasks, self._encode = list(tasks), encode
        self._kept: dict[int, Task] = {}
        """By the id of the task that has changed since; ``_tasks`` keeps that alive."""
        self.over = False
        """All were read, or nobody wants to read them: nothing needs to be kept any more."""

    def keep(self, task: Task) -> None:
        """``task`` is about to change. The first time counts."""
        if not self.over and id(task) not in self._kept:
            self._kept[id(task)] = copy(task)

    def items(self) -> Iterator[tuple[str, Any]]:
        """(task id, encoded task)."""
        for task in self._tasks:
            yield task.task_id, self._encode(self._kept.get(id(task), task))

    def close(self) -> None:
        self.over = True
        self._kept.clear()
        self._tasks.clear()  # most of them are covered before the next snapshot


@dataclass(frozen=True, slots=True)
class Unfinished:
    compact = True

    ordinal: int
    attempt: int
    failures: tuple[str, ...] = ()
    deaths: int = 0


@dataclass(frozen=True, slots=True)
class GroupSizes:
    groups: int = 0
    sequences: int = 0
    tokens: int = 0

    def __add__(self, more: "GroupSizes") -> "GroupSizes":
        sequences, tokens = self.sequences + more.sequences, self.tokens + more.tokens
        return GroupSizes(self.groups + more.groups, sequences, tokens)


def sizes_of(groups: Iterable[GroupMeta]) -> GroupSizes:
    return sum((GroupSizes(1, group.sequences, group.tokens) for group in groups), GroupSizes())


def ordinal_of(task_id: TaskId) -> int:
    """Training task: its position in the endless data order."""
    return int(task_id[1:])


@dataclass(slots=True)
class TaskBook:
    records: dict[TaskId, Task] = field(default_factory=dict)
    cursor: int = 0  # Training tasks dispatched so far
    pending: list[int] = field(default_factory=list)  # Ordinals, ascending
    leased: int = 0
    ready: dict[TaskId, None] = field(default_factory=dict)  # In order of acceptance
    in_step: int = 0
    trained: int = 0  # In the surviving steps
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_groups: dict[str, GroupSizes] = field(default_factory=dict)
    """Generated and dropped since the newest commit, by reason."""
    fruitless: int = 0
    """Training tasks dropped in a row because their attempts failed, without a group in between."""
    last_failure: str = ""  # Reason of the newest of them
    outcomes: dict[TaskId, tuple[int, VerdictCode]] = field(default_factory=dict)
    """Newest attempt of each task that left the memory, and the verdict on a repeat of it."""
    unfinished: list[Unfinished] = field(default_factory=list)  # An extended run does them first
    suspects: dict[TaskId, None] = field(default_factory=dict, init=False, metadata=TRANSIENT)
    """Suspect tasks that wait or are worked at. Each makes requests for tasks dearer, and a record
    stays until a checkpoint covers it."""
    moment: Moment | None = field(default=None, init=False, repr=False, metadata=TRANSIENT)
    """Moment of ``records``, while a snapshot of it is being written."""

    def __post_init__(self) -> None:
        unfinished = (x for x in self.records.values() if x.state in UNFINISHED)
        self.suspects = {x.task_id: None for x in unfinished if x.suspect}

    @property
    def position(self) -> int:
        """Groups that are trained or on their way: a new task queues behind them."""
        return self.trained + self.in_step + len(self.ready) + self.leased

    def lease(self, lease: LeasedTask, owner: str) -> Task:
        task = self.records.get(lease.task_id)
        if task is None:
            task = Task(lease.task_id, Kind.TRAIN, ordinal_of(lease.task_id))
            self.records[lease.task_id] = task
            self.cursor += 1
        self.move(task, TaskState.LEASED)
        task.attempt, task.owner = lease.attempt, owner
        return task

    def count_dropped(self, reason: str, group: GroupMeta) -> None:
        before = self.dropped_groups.get(reason, GroupSizes())
        self.dropped_groups[reason] = before + sizes_of([group])

    def drop(self, task: Task, reason: str, detail: str, verdict: VerdictCode) -> None:
        self.move(task, None)
        self.forget(task, verdict)
        if task.kind is Kind.EVAL:
            return
        self.dropped[reason] += 1
        if reason == DropReason.RUN_ENDED:
            left = Unfinished(task.ordinal, task.attempt, task.failures, task.deaths)
            self.unfinished.append(left)
        if reason == DropReason.UNINFORMATIVE:
            self.fruitless = 0
        elif reason not in _NO_FAILURE:
            self.fruitless += 1
            self.last_failure = f"{reason}: {detail}"

    def resume_unfinished(self) -> None:
        """The run goes on after its end: what the end dropped waits for another attempt."""
        for left in self.unfinished:
            task = Task(TaskId(f"t{left.ordinal}"), Kind.TRAIN, left.ordinal)
            self.records[task.task_id] = task
            self.outcomes.pop(task.task_id, None)
            self.move(task, TaskState.PENDING)
            task.attempt, task.failures, task.deaths = left.attempt, left.failures, left.deaths
            if task.suspect:
                self.suspects[task.task_id] = None
        self.unfinished.clear()
        del self.dropped[DropReason.RUN_ENDED]

    def cover(self, task_ids: Iterable[TaskId]) -> None:
        """A checkpoint covers their step: nothing can bring them back."""
        for task_id in task_ids:
            task = self.records[task_id]
            self.move(task, None)
            self.forget(task, VerdictCode.DUPLICATE)

    def forget(self, task: Task, verdict: VerdictCode) -> None:
        """Takes a finished task out of memory; ``verdict``: on a repeated submission of it."""
        del self.records[task.task_id]
        self.outcomes[task.task_id] = (task.attempt, verdict)
        if len(self.outcomes) > _OUTCOMES_KEPT:
            del self.outcomes[next(iter(self.outcomes))]

    def move_all(self, task_ids: Iterable[TaskId], to: TaskState) -> None:
        for task_id in task_ids:
            self.move(self.records[task_id], to)

    def move(self, task: Task, to: TaskState | None) -> None:
        """Changes the task's state, and with it the queues and counts of the training tasks. Comes
        before any other change of the task."""
        if self.moment is not None:
            self.moment.keep(task)
        before, task.state = task.state, to
        if to not in UNFINISHED:
            self.suspects.pop(task.task_id, None)
        elif task.suspect:
            self.suspects[task.task_id] = None
        if task.kind is Kind.EVAL:
            return
        assert to in TRANSITIONS[before], f"{task.task_id}: {before} to {to}"
        self.leased += (to is TaskState.LEASED) - (before is TaskState.LEASED)
        self.in_step += (to is TaskState.IN_STEP) - (before is TaskState.IN_STEP)
        if to is not None:  # a covered task stays trained
            self.trained += (to is TaskState.TRAINED) - (before is TaskState.TRAINED)
        if before is TaskState.PENDING:
            del self.pending[bisect_left(self.pending, task.ordinal)]
        elif before is TaskState.READY:
            del self.ready[task.task_id]
        if to is TaskState.PENDING:
            insort(self.pending, task.ordinal)
        elif to is TaskState.READY:
            self.ready[task.task_id] = None
