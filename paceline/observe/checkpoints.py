"""Checkpoints of a run, from its listed events."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.observe.vocabulary import DOCUMENTED, EventType

MOST_CHECKPOINTS = 256


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    __pydantic_config__ = DOCUMENTED

    step: int
    version: int
    path: str
    """Relative to the run directory."""
    t: float
    """Unix seconds; 0: unknown."""
    size_bytes: int
    best: bool = False
    """True if it has the highest held-out reward of the checkpoints that were evaluated."""


@dataclass(frozen=True, slots=True)
class BestCheckpoint:
    """The checkpoint with the highest held-out reward so far."""

    step: int
    path: str
    reward_mean: float


@dataclass(slots=True)
class Checkpoints:
    saved: list[SavedCheckpoint] = field(default_factory=list)
    """On the surviving line, oldest first."""
    best: BestCheckpoint | None = None

    def take(self, kind: str, event: Mapping[str, Any]) -> None:
        """Takes the next line of events.jsonl."""
        if kind == EventType.ROLLED_BACK:
            self.saved = [c for c in self.saved if c.step <= int(event["step"])]
            if not self.saved and event.get("checkpoint_path"):
                self._save(event, str(event["checkpoint_path"]))
        elif kind == EventType.CHECKPOINT_RECORDED:
            self._save(event, str(event.get("path", "")))
        elif kind == EventType.CHECKPOINT_VOIDED:
            path = str(event.get("path", ""))
            self.saved = [c for c in self.saved if c.path != path]
            if self.best is not None and self.best.path == path:
                self.best = None
        elif kind == EventType.BEST_CHECKPOINT_CHOSEN:
            score = float(event["reward_mean"])
            self.best = BestCheckpoint(int(event["step"]), str(event["path"]), score)

    def _save(self, event: Mapping[str, Any], path: str) -> None:
        step, version = int(event["step"]), int(event.get("version", 0))
        size_bytes = int(event.get("size_bytes") or 0)
        found = SavedCheckpoint(step, version, path, float(event["t"]), size_bytes)
        self.saved = [*self.saved, found][-MOST_CHECKPOINTS:]

    def kept(self, keep: int) -> list[SavedCheckpoint]:
        """Checkpoints that are on disk, newest first: the newest ``keep``, and the best one."""
        best = self.best.path if self.best is not None else ""
        marked = [replace(c, best=c.path == best) for c in self.saved]
        return [*marked[-keep:][::-1], *(c for c in marked[:-keep] if c.best)]
