"""Spans of a sample's life, folded from the journal's events. Pure: events in, spans out.

    task ├─ lease ──────────────────────┤         ├─ step ────────┤
         │    ├─ generate ──┤─ reward ─┤           │      ├ commit ┤

*lease* is one attempt, up to the accepted group or the reason of its loss; *generate* and *reward*
lie at its end and have the durations that the worker reported. *step* lasts from the step's opening
to its commit, *commit* within it from the first vote. A task that is trained again after a rollback
gets another step span in the same trace.
"""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.observe.vocabulary import EventType


@dataclass(frozen=True, slots=True)
class Span:
    """``key`` identifies the span among those of one task; the task's own key is "task"."""

    task_id: str
    key: str
    name: str
    start: float  # Unix seconds
    end: float
    about: Mapping[str, Any]  # attributes, without their prefix
    error: str = ""  # reason for which the work failed; empty if it succeeded
    parent: str = "task"  # key of the enclosing span; empty: it is the task's own


@dataclass(slots=True)
class _Life:
    began: float
    leases: dict[int, tuple[str, float]] = field(default_factory=dict)
    """Running attempts: worker and start time."""
    again: bool = False
    """The task was trained before, in a step that was lost: its own span is already written."""

    def lease(self, task_id: str, attempt: int, t: float, error: str = "") -> Span:
        worker, begun = self.leases.pop(attempt)
        about = {"worker": worker, "attempt": attempt}
        return Span(task_id, f"lease/{attempt}", "lease", begun, t, about, error)


@dataclass(slots=True)
class SampleSpans:
    """Follows the traced tasks: a ``share`` of all, the same for every leader of ``run``."""

    run: str
    share: float = 1.0
    _lives: dict[str, _Life] = field(default_factory=dict)
    _step: dict[str, Any] = field(default_factory=dict)
    """Event that opened the step, with t and voted (time of the first vote); empty: none."""

    def traced(self, task_id: str) -> bool:
        return zlib.crc32(f"{self.run}/{task_id}".encode()) < self.share * 2**32

    def take(self, t: float, event: Mapping[str, Any]) -> Iterator[Span]:
        """Spans that end with ``event``, which was journalled at ``t`` (unix seconds)."""
        match event.get("type"):
            case EventType.TASKS_LEASED:
                for task_id, attempt, kind, *_ in event["leases"]:
                    if kind == "train" and self.traced(task_id):
                        life = self._lives.setdefault(task_id, _Life(t))
                        life.leases[int(attempt)] = (str(event["worker_id"]), t)
            case EventType.GROUP_ACCEPTED if self.traced(event["group"]["task_id"]):
                yield from self._accepted(t, str(event["worker_id"]), event["group"])
            case EventType.TASK_RELEASED:
                task_id, attempt = event["task_id"], int(event["attempt"])
                known = self._lives.get(task_id)
                if known is not None and attempt in known.leases:
                    yield known.lease(task_id, attempt, t, str(event["reason"]))
            case EventType.TASK_DROPPED:
                task_id, reason = event["task_id"], str(event["reason"])
                if (known := self._lives.pop(task_id, None)) is not None:
                    for attempt in sorted(known.leases):
                        yield known.lease(task_id, attempt, t, reason)
                    about = {"outcome": "dropped", "reason": reason}
                    yield Span(task_id, "task", "task", known.began, t, about, reason, parent="")
            case EventType.STEP_OPENED:
                self._step = {**event, "t": t, "voted": 0.0}
                for task_id in filter(self.traced, event["groups"]):
                    self._lives.setdefault(task_id, _Life(t, again=bool(event["replay"])))
            case EventType.STEP_RESHARDED if self._step:
                again = {"mesh_epoch": event["mesh_epoch"], "shards": event["shards"]}
                self._step |= {**again, "voted": 0.0}
            case EventType.VOTE_CAST if self._step:
                self._step["voted"] = self._step["voted"] or t
            case EventType.STEP_COMMITTED | EventType.STEP_ABORTED:
                step, self._step = self._step, {}
                if step and step["step"] == event["step"]:
                    yield from self._stepped(t, event, step)

    def _accepted(self, t: float, worker_id: str, group: Mapping[str, Any]) -> Iterator[Span]:
        task_id, attempt = group["task_id"], int(group["attempt"])
        # A lease of an earlier leader is known by its end alone.
        begun = t - group["reward_s"] - group["generate_s"]
        life = self._lives.setdefault(task_id, _Life(begun))
        _, begun = life.leases.setdefault(attempt, (worker_id, begun))
        scored = max(begun, t - float(group["reward_s"]))
        generated = max(begun, scored - float(group["generate_s"]))
        about = {
            "worker": worker_id,
            "attempt": attempt,
            "sequences": group["sequences"],
            "tokens": group["tokens"],
            "version.min": group["min_version"],
            "version.max": group["max_version"],
        }
        reward, lease = {"reward.mean": float(group["reward_mean"])}, f"lease/{attempt}"
        key = f"generate/{attempt}"
        yield Span(task_id, key, "generate", generated, scored, about, parent=lease)
        yield Span(task_id, f"reward/{attempt}", "reward", scored, t, reward, parent=lease)
        yield life.lease(task_id, attempt, t)

    def _stepped(
        self, t: float, event: Mapping[str, Any], step: Mapping[str, Any]
    ) -> Iterator[Span]:
        """Ends the step of its tasks, with a commit or without."""
        groups: list[str] = step["groups"]
        replicas = {groups[i]: worker for worker, shard in step["shards"].items() for i in shard}
        number, error = int(step["step"]), str(event.get("reason", ""))
        committed = event["type"] == EventType.STEP_COMMITTED
        end = f"{event['version']}" if committed else f"{step['version']}/aborted"
        key = f"step/{number}/{end}"
        for task_id in filter(self.traced, groups):
            replica = replicas.get(task_id, "")
            about = {"step": number, "replica": replica, "mesh_epoch": step["mesh_epoch"]}
            yield Span(task_id, key, "step", step["t"], t, about, error)
            if not committed:
                continue
            voted, version = step["voted"] or t, {"version": int(event["version"])}
            yield Span(task_id, f"commit/{key}", "commit", voted, t, version, parent=key)
            if not (life := self._lives.pop(task_id)).again:
                trained = {"outcome": "trained", "step": number}
                yield Span(task_id, "task", "task", life.began, t, trained, parent="")
