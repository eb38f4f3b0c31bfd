"""Listed events of a run: bounded, in order, with the time that each fault took to repair."""

import re
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.observe.vocabulary import AT_EVERY_STEP, EventType, Severity

Key = tuple[tuple[int, ...], int]  # Journal position and number within it: orders records

MOST_EVENTS = 20_000
MOST_COMMITS = 2_000
MOST_OPEN = 256

Status = Literal["", "finished", "failed", "interrupted"]
ENDS: Mapping[str, Status] = {EventType.RUN_FINISHED: "finished", EventType.RUN_FAILED: "failed"}
"""Status of a run after each event that ends it for good."""


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


_MARKED = frozenset(
    {
        *(EventType.SCALED, EventType.DRAINED, EventType.SETTINGS_CHANGED),
        *(EventType.RUN_EXTENDED, EventType.CHECKPOINT_RECORDED),
    }
)  # Besides faults, the events that learning curves carry a mark for
KINDS: Mapping[str, Callable[[ListedEvent], bool]] = {
    "all": lambda event: True,
    "notable": lambda event: event.type not in AT_EVERY_STEP,
    "faults": lambda event: event.is_fault,
    "marks": lambda event: event.is_fault or event.type in _MARKED,
}


@dataclass(slots=True)
class EventHistory:
    _events: deque[ListedEvent] = field(default_factory=lambda: deque(maxlen=MOST_EVENTS))
    _routine: deque[ListedEvent] = field(default_factory=lambda: deque(maxlen=MOST_COMMITS))
    _open: list[ListedEvent] = field(default_factory=list)
    """Faults after which no step has been committed yet."""

    def keep(self, event: ListedEvent) -> None:
        """Keeps the next event."""
        if event.type == EventType.STEP_COMMITTED:
            for fault in self._open:
                fault.commit_s = round(event.t - fault.t, 3)
            self._open.clear()
        (self._routine if event.type in AT_EVERY_STEP else self._events).append(event)
        if event.is_fault and event.type != EventType.TASK_DROPPED:
            self._open.append(event)
            del self._open[:-MOST_OPEN]

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
        ``kinds``: all, notable (without commits), faults, or marks. The newest checkpoints get the
        room that the other marks leave. ``steps``: only events with at least and at most so many
        committed steps."""
        marks = newest and kinds == "marks"
        most = limit if newest and not marks else None

        def taken(pool: deque[ListedEvent]) -> list[ListedEvent]:
            """From the newest backwards: a follower asks for the few that came last."""
            found: list[ListedEvent] = []
            for event in reversed(pool):
                if (key is not None and event.key <= key) or len(found) == most:
                    break
                if steps[0] <= event.step <= steps[1] and KINDS[kinds](event):
                    found.append(event)
            return found

        found = [*taken(self._events), *taken(self._routine)]
        if marks:
            # Newest first; a long run's checkpoints would push out the rest.
            found.sort(key=lambda event: event.type == EventType.CHECKPOINT_RECORDED)
            del found[limit:]
        found.sort(key=lambda event: event.key)
        return found[-limit:] if newest else found[:limit]
