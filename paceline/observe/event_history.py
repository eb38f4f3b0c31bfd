"""Listed events of a run: bounded, in order, with the time that each fault took to repair, and what
follows from them for checkpoints and for the end of the run."""

import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from paceline.observe.vocabulary import DOCUMENTED, NOTICED, EventType, Severity

Key = tuple[tuple[int, ...], int]  # Journal position and number within it: orders records

MOST_EVENTS = 20_000
MOST_COMMITS = 2_000
MOST_OPEN = 256
MOST_MARKS = 10_000
MOST_CHECKPOINTS = 256

STEERED = frozenset(
    {EventType.SCALED, EventType.DRAINED, EventType.SETTINGS_CHANGED, EventType.RUN_EXTENDED}
)  # Besides faults and checkpoints, the events that learning curves carry a mark for
Status = Literal["", "finished", "failed", "interrupted"]
ENDS: Mapping[str, Status] = {EventType.RUN_FINISHED: "finished", EventType.RUN_FAILED: "failed"}
"""Status of a run after each event that ends it for good."""
_PAUSES: Mapping[str, Status] = {
    EventType.RUN_SUSPENDED: "interrupted",
    EventType.RUN_CONTINUED: "",
    EventType.RUN_EXTENDED: "",
}
_NOTICED: Mapping[str, str] = {str(evidence): words for evidence, words in NOTICED.items()}
NEW_LEADER = "the previous leader handed over, or did not renew its lease in time"
_HEAD = frozenset({"position", "n", "t", "type", "after", "counts", "severity", "text"})


def position_key(position: str) -> tuple[int, ...]:
    """Sort key of a journal position."""
    return tuple(int(part) for part in re.findall(r"\d+", position))


def is_listed(event: Mapping[str, Any]) -> bool:
    """Return True if people are shown the event. One that happens many times a step has no text."""
    return "text" in event


def text_of(event: Mapping[str, Any]) -> str:
    """A line of prose, as the controller rendered it; the event's type if it carries no text."""
    return str(event.get("text") or event.get("type", "?"))


@dataclass(slots=True)
class ListedEvent:
    """An event that is shown to people."""

    id: str
    """Pass it as ``since`` to continue after this event."""
    t: float
    """Unix seconds."""
    type: str
    step: int
    """Committed steps when it happened."""
    severity: Severity
    """Warnings and errors are faults."""
    text: str
    fields: dict[str, Any]
    noticed: str
    """How a fault was noticed."""
    commit_s: float | None = None
    """Time from a fault until the next step was committed."""

    @property
    def key(self) -> Key:
        position, _, number = self.id.rpartition("/")
        return position_key(position), int(number)

    @property
    def is_fault(self) -> bool:
        return self.severity.is_fault

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


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
class EventHistory:
    """``clean`` is applied to a record's text and fields before they are kept."""

    clean: Callable[[Any], Any] = field(default=lambda value: value, compare=False)
    step: int = 0  # Committed steps on the surviving line
    position: str = ""  # Journal position of the newest event
    resumed: list[float] = field(default_factory=list)
    """When a leader began without a failover: at the start of the run, and each time a run that had
    been stopped was resumed. Unix seconds, ascending."""
    checkpoints: list[SavedCheckpoint] = field(default_factory=list)
    """On the surviving line, oldest first."""
    best: BestCheckpoint | None = None
    status: Status = ""  # Empty while the run goes on, or if it was killed
    reason: str = ""  # Reason for which the run has ended, or was stopped for now
    took_s: float | None = None
    """Time of all sessions, without the pauses between them; None without any event."""
    _newest_t: float = 0.0
    drops: deque[ListedEvent] = field(default_factory=lambda: deque(maxlen=500))
    _last: Key = ((), -1)
    _events: deque[ListedEvent] = field(default_factory=lambda: deque(maxlen=MOST_EVENTS))
    _commits: deque[ListedEvent] = field(default_factory=lambda: deque(maxlen=MOST_COMMITS))
    # Kept apart: a long run's checkpoints would push out the rest.
    _marks: deque[ListedEvent] = field(default_factory=lambda: deque(maxlen=MOST_MARKS))
    _saved: deque[ListedEvent] = field(default_factory=lambda: deque(maxlen=MOST_MARKS))
    _open: list[ListedEvent] = field(default_factory=list)
    """Faults after which no step has been committed yet."""

    def add(self, record: Mapping[str, Any]) -> bool:
        """Takes the next line of events.jsonl. False, with nothing changed, if it is known."""
        key = (position_key(str(record["position"])), int(record["n"]))
        if key <= self._last:
            return False
        self._last, self.position = key, str(record["position"])
        event = self._listed(key[1], record)
        self._fold(event, record)
        if event.type == EventType.STEP_COMMITTED:
            self._commits.append(event)
            return True
        self._events.append(event)
        if event.type == EventType.CHECKPOINT_RECORDED:
            self._saved.append(event)
        elif event.type == EventType.TASK_DROPPED:
            self.drops.append(event)
        elif event.is_fault or event.type in STEERED:
            self._marks.append(event)
        return True

    def _listed(self, n: int, record: Mapping[str, Any]) -> ListedEvent:
        kind = str(record.get("type", ""))
        fields = {k: v for k, v in record.items() if k not in _HEAD}
        if kind == EventType.STEP_COMMITTED:
            # metrics.jsonl has the rest.
            reward = (record.get("metrics") or {}).get("reward_mean")
            fields = {"step": record["step"], "reward_mean": reward}
        elif kind == EventType.RUN_STARTED:
            fields = {}
        severity = Severity(record.get("severity") or Severity.INFO)
        noticed = _NOTICED.get(str(record.get("how") or record.get("reason") or ""), "")
        took_over = severity.is_fault and kind == EventType.TERM_BEGUN
        return ListedEvent(
            id=f"{record['position']}/{n}",
            t=float(record["t"]),
            type=kind,
            step=int(record["step"]) if kind == EventType.STEP_COMMITTED else self.step,
            severity=severity,
            text=self.clean(text_of(record)),
            fields=self.clean(fields),
            noticed=NEW_LEADER if took_over else noticed,
        )

    def _fold(self, event: ListedEvent, record: Mapping[str, Any]) -> None:
        begins = event.type == EventType.TERM_BEGUN and not record.get("failover")
        if self.took_s is None:
            self.took_s = 0.0
        elif not begins:
            self.took_s += max(0.0, event.t - self._newest_t)
        self._newest_t = event.t
        if event.type in ENDS or event.type in _PAUSES:
            self.status = ENDS[event.type] if event.type in ENDS else _PAUSES[event.type]
            self.reason = str(record.get("reason") or "") if self.status else ""
        if event.type == EventType.STEP_COMMITTED:
            self.step = event.step
            for fault in self._open:
                fault.commit_s = round(event.t - fault.t, 3)
            self._open.clear()
        elif event.type == EventType.ROLLED_BACK:
            self.step = int(record["step"])
            self.checkpoints = [c for c in self.checkpoints if c.step <= self.step]
            if not self.checkpoints and record.get("checkpoint_path"):
                self._save(record, str(record["checkpoint_path"]), event.t)
        elif event.type == EventType.CHECKPOINT_RECORDED:
            self._save(record, str(record.get("path", "")), event.t)
        elif event.type == EventType.CHECKPOINT_VOIDED:
            path = str(record.get("path", ""))
            self.checkpoints = [c for c in self.checkpoints if c.path != path]
            if self.best is not None and self.best.path == path:
                self.best = None
        elif event.type == EventType.BEST_CHECKPOINT_CHOSEN:
            self.best = BestCheckpoint(
                int(record["step"]), str(record["path"]), float(record["reward_mean"])
            )
        elif begins:
            self.resumed.append(event.t)
        if event.is_fault and event.type != EventType.TASK_DROPPED:
            self._open.append(event)
            del self._open[:-MOST_OPEN]

    def _save(self, record: Mapping[str, Any], path: str, t: float) -> None:
        step, version = int(record["step"]), int(record.get("version", 0))
        size_bytes = int(record.get("size_bytes") or 0)
        saved = SavedCheckpoint(step, version, path, t, size_bytes)
        self.checkpoints = [*self.checkpoints, saved][-MOST_CHECKPOINTS:]

    def kept_checkpoints(self, keep: int) -> list[SavedCheckpoint]:
        """Checkpoints that are on disk, newest first: the newest ``keep``, and the best one."""
        best = self.best.path if self.best is not None else ""
        marked = [replace(c, best=c.path == best) for c in self.checkpoints]
        return [*marked[-keep:][::-1], *(c for c in marked[:-keep] if c.best)]

    def after(
        self,
        key: Key | None,
        *,
        limit: int,
        kinds: str = "all",
        newest: bool = False,
        steps: tuple[int, int] = (0, 1 << 62),
    ) -> list[ListedEvent]:
        """Events after ``key``, oldest first, at most ``limit``; ``newest``: the last of them.
        ``kinds``: all, notable (without commits), faults, or marks. Checkpoints get the room that
        the other marks leave; if they do not fit, every n-th is returned. ``steps``: only events
        with at least and at most so many committed steps."""

        def taken(pool: deque[ListedEvent], most: int | None = None) -> list[ListedEvent]:
            """From the newest backwards: a follower asks for the few that came last."""
            found: list[ListedEvent] = []
            for event in reversed(pool):
                if (key is not None and event.key <= key) or len(found) == most:
                    break
                if steps[0] <= event.step <= steps[1] and (kinds != "faults" or event.is_fault):
                    found.append(event)
            return found

        def in_order(*parts: list[ListedEvent]) -> list[ListedEvent]:
            return sorted((e for part in parts for e in part), key=lambda e: e.key)

        if kinds == "marks":
            marks, saved = in_order(taken(self._marks), taken(self.drops)), taken(self._saved)
            if newest:
                marks = marks[-limit:]
                room = limit - len(marks)
                saved = saved[:: -(-len(saved) // room) or 1] if room else []
            return in_order(marks, saved)[:limit]
        most = limit if newest else None
        pools = (self._events, self._commits) if kinds == "all" else (self._events,)
        found = in_order(*(taken(pool, most) for pool in pools))
        return found[-limit:] if newest else found[:limit]
