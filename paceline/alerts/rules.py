"""Rules: which events and metric rows of a run are alerts. Pure: records in, alerts out.

One alert a kind in ``QUIET_S``; the next one tells how many were held back. What is true once is
told once: the end of the run always.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from paceline.config.sections.services import AlertKind
from paceline.observe.run_end import ENDS
from paceline.observe.vocabulary import EventType

QUIET_S = 300.0
WINDOW = 10
"""Steps whose mean reward is compared."""


@dataclass(frozen=True, slots=True)
class Alert:
    kind: AlertKind
    key: str
    """The same however often it is sent: journal position, or what it is about."""
    text: str
    t: float
    """Unix seconds."""
    step: int = 0
    held_back: int = 0
    """Alerts of this kind since the last one that was sent."""

    def message(self, run: str) -> dict[str, Any]:
        """As JSON. ``text`` is what chat services show."""
        more = f" (and {self.held_back} more before it)" if self.held_back else ""
        return {
            "text": f"[{run}] {self.kind.replace('_', ' ')}: {self.text}{more}",
            "run": run,
            "kind": self.kind,
            "id": f"{run}/{self.kind}/{self.key}",
            "step": self.step,
            "t": self.t,
            "held_back": self.held_back,
        }


@dataclass(slots=True)
class AlertRules:
    """``reward_drop``: fraction of the best mean reward over WINDOW steps by which a later one is
    lower."""

    kinds: frozenset[str]
    reward_drop: float
    _told: dict[str, float] = field(default_factory=dict)
    """Time of the last alert of each kind."""
    _held_back: dict[str, int] = field(default_factory=dict)
    _rewards: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _best: float | None = None
    _collapsed: bool = False

    def of_event(self, record: Mapping[str, Any]) -> Iterator[Alert]:
        """``record``: a line of events.jsonl."""
        kind, text = str(record.get("type", "")), str(record.get("text", ""))
        key, t = f"{record.get('position')}/{record.get('n')}", float(record.get("t", 0.0))
        step = int(record.get("step") or 0)
        if kind in ENDS:
            yield from self._tell("end", key, text, t, step)
        elif kind == EventType.HELD_OUT_FELL:
            yield from self._tell("held_out", key, text, t, step)
        elif kind == EventType.REWARD_HACKING_SUSPECTED:
            yield from self._tell("reward_hacking", key, text, t, step)
        elif record.get("severity") in ("warning", "error"):
            yield from self._tell("fault", key, text, t, step)

    def of_metrics(self, row: Mapping[str, Any]) -> Iterator[Alert]:
        """``row``: a line of metrics.jsonl. The file has null for what is not finite."""
        if row.get("kind") != "step":
            return
        step, t, key = int(row.get("step", 0)), float(row.get("t", 0.0)), str(row.get("position"))
        gone = [n for n in ("loss", "grad_norm", "reward_mean") if n in row and row[n] is None]
        if gone or (row.get("update_skipped") or 0.0) > 0:
            what = f"{' and '.join(gone)} not finite" if gone else "gradient not finite: no update"
            yield from self._tell("nan", key, f"step {step}: {what}", t, step)
        reward = row.get("reward_mean")
        if reward is not None and (text := self._collapse(step, float(reward))):
            yield from self._tell("reward_collapse", key, text, t, step)

    def of_state(
        self, kind: AlertKind, key: str, text: str, t: float, step: int
    ) -> Iterator[Alert]:
        """A stall, or a full disk: nothing in the journal."""
        yield from self._tell(kind, key, text, t, step)

    def _collapse(self, step: int, reward: float) -> str:
        self._rewards.append(reward)
        if len(self._rewards) < WINDOW or not self.reward_drop:
            return ""
        mean = fmean(self._rewards)
        if self._best is None or mean > self._best:
            self._best = mean
        low = self._best - mean > self.reward_drop * abs(self._best)
        fresh, self._collapsed = low and not self._collapsed, low
        if not fresh:
            return ""
        return f"mean reward of the last {WINDOW} steps is {mean:.3f}, it was {self._best:.3f}"

    def _tell(self, kind: AlertKind, key: str, text: str, t: float, step: int) -> Iterator[Alert]:
        if kind not in self.kinds:
            return
        last = self._told.get(kind)
        if kind != "end" and last is not None and t - last < QUIET_S:
            self._held_back[kind] = self._held_back.get(kind, 0) + 1
            return
        self._told[kind] = t
        yield Alert(kind, key, text, t, step, self._held_back.pop(kind, 0))
