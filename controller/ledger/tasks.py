"""Tasks: one prompt occurrence each, and where it stands.

Every task ever dispatched is exactly one of: pending, leased, ready, in a step, trained, dropped.
Tasks come from a cursor over the endless shuffled data set (``t0``, ``t1``, ...); a task that lost
its owner waits in ``pending`` and goes out before any new one, lowest ordinal first.

Finished tasks leave the memory: trained ones with the checkpoint that covers their step, dropped
ones at once. Counters remain, and the last few thousand outcomes, so that a repeated submission
gets the answer the first one got.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field
from enum import StrEnum
from typing import Any

from controller.ledger.commands import GroupFacts, Kind, LeasedTask
from controller.ledger.events import (
    GroupAccepted,
    TaskDropped,
    TaskReleased,
)

_OUTCOMES_KEPT = 4096
_NO_FAILURE = ("stale", "run_ended")
"""Reasons of drops that say nothing about the tries."""
SUSPECT_DEATHS = 2
"""Owners that died with a task before it is leased alone. One death happens to everybody."""


class TaskState(StrEnum):
    PENDING = "pending"  # waits for a lease, after an earlier try
    LEASED = "leased"  # an owner works on it
    READY = "ready"  # training group accepted, waits for a step
    IN_STEP = "in_step"  # in the open step, or reserved for a step that is trained again
    TRAINED = "trained"  # its step is committed
    # dropped, and trained under a checkpoint: not in memory any more


TRANSITIONS: dict[TaskState | None, frozenset[TaskState | None]] = {
    None: frozenset({TaskState.LEASED}),
    TaskState.PENDING: frozenset({TaskState.LEASED, None}),
    TaskState.LEASED: frozenset({TaskState.PENDING, TaskState.READY, None}),
    TaskState.READY: frozenset({TaskState.IN_STEP, None}),
    TaskState.IN_STEP: frozenset({TaskState.TRAINED, TaskState.READY}),
    TaskState.TRAINED: frozenset({TaskState.IN_STEP, None}),
}
"""Where a training task may go from where; None is "not in memory": not yet dispatched, dropped,
or trained under a checkpoint."""


@dataclass(slots=True)
class Task:
    task_id: str
    kind: Kind
    ordinal: int
    """Train: position in the endless data order. Eval: row of the held-out set."""
    stand: TaskState | None = None
    attempt: int = 0
    """Newest try, running or not."""
    owner: str = ""
    """Worker id of the newest try."""
    failures: tuple[str, ...] = ()
    """One line for each try that counts towards quarantine."""
    deaths: int = 0
    """Owners that died while they held it, alone or with others."""
    group: GroupFacts | None = None
    eval_step: int = -1

    @property
    def leased(self) -> bool:
        """The newest try runs, on ``owner``."""
        return self.stand is TaskState.LEASED

    def leased_as(self, attempt: int, worker_id: str) -> bool:
        """This attempt runs, on this worker."""
        return self.leased and (self.attempt, self.owner) == (attempt, worker_id)

    @property
    def suspect(self) -> bool:
        """May be what its owners died of: leased to a worker that holds nothing else."""
        return self.deaths >= SUSPECT_DEATHS


@dataclass(slots=True)
class TaskBook:
    """The training tasks, and the records of evaluation tasks under way."""

    records: dict[str, Task] = field(default_factory=dict)
    cursor: int = 0
    """Training tasks dispatched so far."""
    pending: list[int] = field(default_factory=list)
    """Heap of ordinals."""
    leased: int = 0
    ready: dict[str, None] = field(default_factory=dict)
    """In order of acceptance."""
    in_step: int = 0
    trained: int = 0
    """On the surviving line."""
    dropped: Counter[str] = field(default_factory=Counter)
    fruitless: int = 0
    """Training tasks dropped in a row because their tries failed, without a group in between."""
    last_failure: str = ""
    """Why the newest of them was dropped."""
    outcomes: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Of tasks that left the memory: the newest attempt, and the verdict on a repeat of it."""

    @property
    def position(self) -> int:
        """Groups that are trained or on their way: what a new task would queue behind."""
        return self.trained + self.in_step + len(self.ready) + self.leased

    # ---- what events do -------------------------------------------------------------------

    def apply_leased(self, lease: LeasedTask, owner: str) -> None:
        task = self.records.get(lease.task_id)
        if task is None:
            task = Task(lease.task_id, Kind.TRAIN, self.cursor)
            self.records[lease.task_id] = task
            self.cursor += 1
        elif task.kind is Kind.TRAIN:
            self._unqueue(task.ordinal)
        self._move(task, TaskState.LEASED)
        task.attempt, task.owner = lease.attempt, owner
        if task.kind is Kind.TRAIN:
            self.leased += 1

    def apply_accepted(self, event: GroupAccepted) -> None:
        task, group = self.records[event.group.task_id], event.group
        self._move(task, TaskState.READY)
        self.leased -= 1
        self.fruitless = 0
        task.group = group
        self.ready[task.task_id] = None

    def apply_released(self, event: TaskReleased) -> None:
        task = self.records[event.task_id]
        if event.counts:
            task.failures += (f"{event.worker_id}: {event.reason} {event.detail}".strip(),)
        task.deaths += event.suspected
        self._move(task, TaskState.PENDING)
        if task.kind is Kind.TRAIN:
            self.leased -= 1
            heapq.heappush(self.pending, task.ordinal)

    def apply_dropped(self, event: TaskDropped) -> None:
        task = self.records[event.task_id]
        before = task.stand
        self._move(task, None)
        if task.kind is Kind.TRAIN:
            if before is TaskState.PENDING:
                self._unqueue(task.ordinal)
            elif before is TaskState.LEASED:
                self.leased -= 1
            else:
                del self.ready[task.task_id]
            self.dropped[event.reason] += 1
            if event.reason == "uninformative":
                self.fruitless = 0
            elif event.reason not in _NO_FAILURE:
                self.fruitless += 1
                self.last_failure = f"{event.reason}: {event.detail}"
        self.forget(task, event.verdict)

    def take_into_step(self, task_ids: Iterable[str]) -> None:
        for task_id in task_ids:
            self._move(self.records[task_id], TaskState.IN_STEP)
            del self.ready[task_id]
            self.in_step += 1

    def back_to_ready(self, task_ids: Iterable[str]) -> None:
        for task_id in task_ids:
            self._move(self.records[task_id], TaskState.READY)
            self.ready[task_id] = None
            self.in_step -= 1

    def train(self, task_ids: Iterable[str]) -> None:
        for task_id in task_ids:
            self._move(self.records[task_id], TaskState.TRAINED)
            self.in_step -= 1
            self.trained += 1

    def untrain(self, task_ids: Iterable[str]) -> None:
        """The step they were trained in is lost; they are kept for the same step again."""
        for task_id in task_ids:
            self._move(self.records[task_id], TaskState.IN_STEP)
            self.trained -= 1
            self.in_step += 1

    def cover(self, task_ids: Iterable[str]) -> None:
        """A checkpoint covers their step: nothing can bring them back."""
        for task_id in task_ids:
            task = self.records[task_id]
            self._move(task, None)
            self.forget(task, "duplicate")

    def forget(self, task: Task, verdict: str) -> None:
        """Takes a finished task out of memory; ``verdict``: on a repeated submission of it."""
        del self.records[task.task_id]
        self.outcomes[task.task_id] = (task.attempt, verdict)
        if len(self.outcomes) > _OUTCOMES_KEPT:
            del self.outcomes[next(iter(self.outcomes))]

    def _unqueue(self, ordinal: int) -> None:
        """Nearly always the lowest; suspects are passed over, and go out of turn."""
        if self.pending[0] == ordinal:
            heapq.heappop(self.pending)
        else:
            self.pending.remove(ordinal)
            heapq.heapify(self.pending)

    @staticmethod
    def _move(task: Task, to: TaskState | None) -> None:
        assert to in TRANSITIONS[task.stand] or task.kind is Kind.EVAL, (
            f"{task.task_id}: {task.stand} to {to}"
        )
        task.stand = to

    # ---- snapshot -------------------------------------------------------------------------

    def dump(self) -> dict[str, Any]:
        return {
            "records": [_dump_task(t) for t in self.records.values()],
            "cursor": self.cursor,
            "pending": sorted(self.pending),
            "leased": self.leased,
            "ready": list(self.ready),
            "in_step": self.in_step,
            "trained": self.trained,
            "dropped": dict(self.dropped),
            "fruitless": self.fruitless,
            "last_failure": self.last_failure,
            "outcomes": [[k, *v] for k, v in self.outcomes.items()],
        }

    @classmethod
    def load(cls, data: dict[str, Any]) -> TaskBook:
        tasks = [_load_task(t) for t in data["records"]]
        return cls(
            records={t.task_id: t for t in tasks},
            cursor=data["cursor"],
            pending=list(data["pending"]),
            leased=data["leased"],
            ready=dict.fromkeys(data["ready"]),
            in_step=data["in_step"],
            trained=data["trained"],
            dropped=Counter(data["dropped"]),
            fruitless=data.get("fruitless", 0),
            last_failure=data.get("last_failure", ""),
            outcomes={k: (n, said) for k, n, said in data["outcomes"]},
        )


def _dump_task(task: Task) -> list[Any]:
    return [
        task.task_id,
        str(task.kind),
        task.ordinal,
        None if task.stand is None else str(task.stand),
        task.attempt,
        task.owner,
        list(task.failures),
        None if task.group is None else list(astuple(task.group)),
        task.eval_step,
        task.deaths,
    ]


def _load_task(data: list[Any]) -> Task:
    task_id, kind, ordinal, stand, attempt, owner, failures, group, eval_step, deaths = data
    return Task(
        task_id=task_id,
        kind=Kind(kind),
        ordinal=ordinal,
        stand=None if stand is None else TaskState(stand),
        attempt=attempt,
        owner=owner,
        failures=tuple(failures),
        group=None if group is None else GroupFacts(*group),
        eval_step=eval_step,
        deaths=deaths,
    )
