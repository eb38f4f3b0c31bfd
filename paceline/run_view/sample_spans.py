"""Spans of a sample's life, folded from the events of the journal.

    task ├─ lease ──────────────────────┤─ ready ─┤─ step ────────┤
         │    ├─ generate ──┤─ reward ─┤           │      ├ commit ┤

- *task* begins with the first lease and ends when the task is trained or dropped.
- *lease* is one attempt, from the lease to the accepted group; a released one ends with the reason.
  Two may run at a time.
- *generate* and *reward* lie at the end of the lease; the worker reports how long they took.
- *ready* is the wait for a step, *step* lasts from its opening to its commit, and *commit* from the
  first vote.
- After a rollback, a task that is trained again gets another ready or step span in its trace.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Attributes = Mapping[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class Span:
    """``key`` is unique among the spans of one task; the task's own span has the key "task"."""

    task_id: str
    key: str
    name: str
    start: float
    """Unix seconds."""
    end: float
    attributes: Attributes
    error: str = ""
    """Why it failed; empty if it did not."""
    parent: str = "task"
    """Key of the span it lies in."""


@dataclass(slots=True)
class _Life:
    began: float
    leases: dict[int, tuple[str, float]] = field(default_factory=dict)
    """Worker and start of each running attempt."""
    ready: float = 0.0
    again: bool = False
    """Trained before, in a step that was lost: its own span has been sent."""


@dataclass(slots=True)
class _Step:
    number: int
    version: int
    opened: float
    groups: tuple[str, ...]
    replicas: dict[str, str]
    """Replica that computes each task."""
    round: int = 0
    voted: float = 0.0


@dataclass(slots=True)
class SampleSpans:
    """Follows the tasks that are traced: a ``share`` of them, the same for every leader of ``run``."""

    run: str
    share: float = 1.0
    _lives: dict[str, _Life] = field(default_factory=dict)
    _step: _Step | None = None

    def traced(self, task_id: str) -> bool:
        return zlib.crc32(f"{self.run}/{task_id}".encode()) < self.share * 2**32

    def take(self, t: float, event: Mapping[str, Any]) -> Iterator[Span]:
        """Spans that end with ``event``, which was journalled at ``t`` (unix seconds)."""
        kind = event.get("type")
        if kind == "TasksLeased":
            self._leased(t, event)
        elif kind == "GroupAccepted":
            yield from self._accepted(t, event)
        elif kind == "TaskReleased":
            yield from self._released(t, event, str(event["reason"]))
        elif kind == "LeaseSuperseded":
            yield from self._released(t, event, "superseded")
        elif kind == "TaskDropped":
            yield from self._dropped(t, event)
        elif kind == "StepOpened":
            yield from self._opened(t, event)
        elif kind == "StepResharded" and self._step is not None:
            self._step.round, self._step.voted = int(event["round"]), 0.0
            self._step.replicas = _replicas(self._step.groups, event["shards"])
        elif kind == "VoteCast" and self._step is not None:
            self._step.voted = self._step.voted or t
        elif kind == "StepCommitted":
            yield from self._committed(t, event)
        elif kind == "StepAborted":
            yield from self._aborted(t, event)

    def _leased(self, t: float, event: Mapping[str, Any]) -> None:
        for task_id, attempt, task_kind, *_ in event["leases"]:
            if task_kind == "train" and self.traced(task_id):
                life = self._lives.setdefault(task_id, _Life(t))
                life.leases[int(attempt)] = (str(event["worker_id"]), t)

    def _accepted(self, t: float, event: Mapping[str, Any]) -> Iterator[Span]:
        task_id, attempt = str(event["task_id"]), int(event["attempt"])
        if not self.traced(task_id):
            return
        worker = str(event["worker_id"])
        life = self._lives.setdefault(task_id, _Life(t))
        # Unknown where its lease was journalled by an earlier leader and has been trimmed since.
        _, begun = life.leases.pop(attempt, (worker, t))
        scored = max(begun, t - float(event["reward_s"]))
        generated = max(begun, scored - float(event["generate_s"]))
        facts: Attributes = {
            "paceline.worker": worker,
            "paceline.attempt": attempt,
            "paceline.sequences": int(event["sequences"]),
            "paceline.tokens": int(event["tokens"]),
            "paceline.version.min": int(event["min_version"]),
            "paceline.version.max": int(event["max_version"]),
        }
        lease = f"lease/{attempt}"
        yield Span(
            task_id, f"generate/{attempt}", "generate", generated, scored, facts, parent=lease
        )
        rewards = {"paceline.reward.mean": float(event["reward_mean"])}
        yield Span(task_id, f"reward/{attempt}", "reward", scored, t, rewards, parent=lease)
        about: Attributes = {"paceline.worker": worker, "paceline.attempt": attempt}
        yield Span(task_id, lease, "lease", begun, t, about)
        life.ready = t

    def _released(self, t: float, event: Mapping[str, Any], reason: str) -> Iterator[Span]:
        life = self._lives.get(str(event["task_id"]))
        if life is not None and int(event["attempt"]) in life.leases:
            yield self._lease_lost(str(event["task_id"]), life, int(event["attempt"]), t, reason)

    def _dropped(self, t: float, event: Mapping[str, Any]) -> Iterator[Span]:
        task_id, reason = str(event["task_id"]), str(event["reason"])
        life = self._lives.pop(task_id, None)
        if life is None:
            return
        for attempt in sorted(life.leases):
            yield self._lease_lost(task_id, life, attempt, t, reason)
        if life.ready:
            yield self._ready(task_id, life, t, "dropped")
        about = {"paceline.outcome": "dropped", "paceline.reason": reason}
        yield Span(task_id, "task", "task", life.began, t, about, error=reason, parent="")

    def _opened(self, t: float, event: Mapping[str, Any]) -> Iterator[Span]:
        groups = tuple(g for g in event["groups"] if self.traced(g))
        number = int(event["step"])
        replicas = _replicas(event["groups"], event["shards"])
        self._step = _Step(number, int(event["version"]), t, groups, replicas)
        for task_id in groups:
            life = self._lives.setdefault(task_id, _Life(t, again=bool(event["replay"])))
            if life.ready:
                yield self._ready(task_id, life, t, str(number))
                life.ready = 0.0

    def _committed(self, t: float, event: Mapping[str, Any]) -> Iterator[Span]:
        step, self._step = self._step, None
        if step is None or step.number != int(event["step"]):
            return
        key = f"step/{step.number}/{int(event['version'])}"
        for task_id in step.groups:
            life = self._lives.pop(task_id)
            commit = {"paceline.version": int(event["version"])}
            yield Span(task_id, f"commit/{key}", "commit", step.voted or t, t, commit, parent=key)
            yield self._in_step(step, task_id, key, t)
            if not life.again:
                about: Attributes = {"paceline.outcome": "trained", "paceline.step": step.number}
                yield Span(task_id, "task", "task", life.began, t, about, parent="")

    def _aborted(self, t: float, event: Mapping[str, Any]) -> Iterator[Span]:
        step, self._step = self._step, None
        if step is None or step.number != int(event["step"]):
            return
        for task_id in step.groups:
            key = f"step/{step.number}/{step.version}/aborted"
            yield self._in_step(step, task_id, key, t, error=str(event["reason"]))
            self._lives[task_id].ready = t

    @staticmethod
    def _in_step(step: _Step, task_id: str, key: str, t: float, error: str = "") -> Span:
        about: Attributes = {
            "paceline.step": step.number,
            "paceline.replica": step.replicas.get(task_id, ""),
            "paceline.round": step.round,
        }
        return Span(task_id, key, "step", step.opened, t, about, error=error)

    @staticmethod
    def _ready(task_id: str, life: _Life, t: float, until: str) -> Span:
        return Span(task_id, f"ready/{life.ready:.6f}/{until}", "ready", life.ready, t, {})

    @staticmethod
    def _lease_lost(task_id: str, life: _Life, attempt: int, t: float, reason: str) -> Span:
        worker, begun = life.leases.pop(attempt)
        about: Attributes = {"paceline.worker": worker, "paceline.attempt": attempt}
        return Span(task_id, f"lease/{attempt}", "lease", begun, t, about, error=reason)


def _replicas(groups: Sequence[str], shards: Mapping[str, Sequence[int]]) -> dict[str, str]:
    return {groups[i]: worker for worker, shard in shards.items() for i in shard}
