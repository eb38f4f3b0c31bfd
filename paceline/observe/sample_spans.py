"""Spans of a sample's life, folded from the journal's events. Pure: events in, spans out.

    task ├─ lease ──────────────────────┤─ ready ─┤─ step ────────┤
         │    ├─ generate ──┤─ reward ─┤           │      ├ commit ┤

- The task's span begins with its first lease and ends when it is trained or dropped.
- *lease* is one attempt, from the lease to the accepted group. If the lease is released, the span
  ends with the reason.
- *generate* and *reward* lie at the end of the lease and have the durations that the worker
  reported.
- *ready* is the wait for a step. *step* lasts from the step's opening to its commit, and *commit*
  within it from the first vote.
- After a rollback a task is trained again, and gets another ready or step span in the same trace.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.observe.vocabulary import EventType

Attributes = Mapping[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class Span:
    """``key`` identifies the span among those of one task; the task's own key is "task"."""

    task_id: str
    key: str
    name: str
    start: float
    """Unix seconds."""
    end: float
    attributes: Attributes
    error: str = ""
    """Why the work failed; empty if it succeeded."""
    parent: str = "task"
    """Key of the enclosing span."""


@dataclass(slots=True)
class _Life:
    began: float
    leases: dict[int, tuple[str, float]] = field(default_factory=dict)
    """Running attempts: worker and start time."""
    ready: float = 0.0
    again: bool = False
    """The task was trained before, in a step that was lost: its own span is already written."""


@dataclass(slots=True)
class _Step:
    number: int
    version: int
    opened: float
    groups: tuple[str, ...]
    replicas: dict[str, str]
    """Task to the replica that trains it."""
    epoch: int
    voted: float = 0.0


@dataclass(slots=True)
class SampleSpans:
    """Follows the traced tasks: a ``share`` of all, the same for every leader of ``run``."""

    run: str
    share: float = 1.0
    _lives: dict[str, _Life] = field(default_factory=dict)
    _step: _Step | None = None

    def traced(self, task_id: str) -> bool:
        return zlib.crc32(f"{self.run}/{task_id}".encode()) < self.share * 2**32

    def take(self, t: float, event: Mapping[str, Any]) -> Iterator[Span]:
        """Spans that end with ``event``, which was journalled at ``t`` (unix seconds)."""
        kind = event.get("type")
        if kind == EventType.TASKS_LEASED:
            self._leased(t, event)
        elif kind == EventType.GROUP_ACCEPTED:
            yield from self._accepted(t, event)
        elif kind == EventType.TASK_RELEASED:
            task_id, attempt = str(event["task_id"]), int(event["attempt"])
            life = self._lives.get(task_id)
            if life is not None and attempt in life.leases:
                yield self._lease(task_id, life, attempt, t, error=str(event["reason"]))
        elif kind == EventType.TASK_DROPPED:
            yield from self._dropped(t, event)
        elif kind == EventType.STEP_OPENED:
            yield from self._opened(t, event)
        elif kind == EventType.STEP_RESHARDED and self._step is not None:
            self._step.epoch, self._step.voted = int(event["mesh_epoch"]), 0.0
            self._step.replicas = _replicas(self._step.groups, event["shards"])
        elif kind == EventType.VOTE_CAST and self._step is not None:
            self._step.voted = self._step.voted or t
        elif kind == EventType.STEP_COMMITTED:
            yield from self._committed(t, event)
        elif kind == EventType.STEP_ABORTED:
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
        # The lease is unknown if its journal entry was trimmed before this leader replayed it.
        _, begun = life.leases.setdefault(attempt, (worker, t))
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
        yield self._lease(task_id, life, attempt, t)
        life.ready = t

    def _dropped(self, t: float, event: Mapping[str, Any]) -> Iterator[Span]:
        task_id, reason = str(event["task_id"]), str(event["reason"])
        life = self._lives.pop(task_id, None)
        if life is None:
            return
        for attempt in sorted(life.leases):
            yield self._lease(task_id, life, attempt, t, error=reason)
        if life.ready:
            yield self._ready(task_id, life, t, "dropped")
        about = {"paceline.outcome": "dropped", "paceline.reason": reason}
        yield Span(task_id, "task", "task", life.began, t, about, error=reason, parent="")

    def _opened(self, t: float, event: Mapping[str, Any]) -> Iterator[Span]:
        groups = tuple(g for g in event["groups"] if self.traced(g))
        number = int(event["step"])
        replicas = _replicas(event["groups"], event["shards"])
        self._step = _Step(
            number, int(event["version"]), t, groups, replicas, int(event["mesh_epoch"])
        )
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
            "paceline.mesh_epoch": step.epoch,
        }
        return Span(task_id, key, "step", step.opened, t, about, error=error)

    @staticmethod
    def _ready(task_id: str, life: _Life, t: float, until: str) -> Span:
        return Span(task_id, f"ready/{life.ready:.6f}/{until}", "ready", life.ready, t, {})

    @staticmethod
    def _lease(task_id: str, life: _Life, attempt: int, t: float, error: str = "") -> Span:
        worker, begun = life.leases.pop(attempt)
        about: Attributes = {"paceline.worker": worker, "paceline.attempt": attempt}
        return Span(task_id, f"lease/{attempt}", "lease", begun, t, about, error=error)


def _replicas(groups: Sequence[str], shards: Mapping[str, Sequence[int]]) -> dict[str, str]:
    return {groups[i]: worker for worker, shard in shards.items() for i in shard}
