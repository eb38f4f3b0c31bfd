"""The listed events of a run: bounded, in order, and what became of each fault."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from paceline.run_view.event_text import tell
from paceline.run_view.run_file_writer import position_key

MOST_EVENTS = 20_000
MOST_COMMITS = 2_000
MOST_OPEN = 256
MOST_MARKS = 5_000

Key = tuple[tuple[int, ...], int]

FAULTS = frozenset(
    {"WorkerDied", "MeshBroken", "RolledBack", "StepAborted", "RunFailed", "TaskDropped"}
)
ROUTINE = frozenset({"StepCommitted", "StepResharded", "EvalScheduled"})
STEERED = frozenset({"Scaled", "Drained"})
"""With faults and checkpoints, what the learning curves carry a mark for."""

NOTICED = {
    "exit": "its launcher saw the process end",
    "lease": "nothing was heard of it for longer than its lease",
    "suspect": "its connection broke, and a peer's collective with it failed",
    "wedged": "its main loop got nowhere for too long",
    "replaced": "a new process of the same name came up",
    "peer_error": "a member reported a failed collective",
    "member_died": "a member was declared dead",
    "diverged": "the members' weights were not equal",
    "lost_commit": "a member held a version whose commit is lost",
}
NEW_LEADER = "the leader before handed over, or did not renew its lease in time"


@dataclass(slots=True)
class ListedEvent:
    """One listed event."""

    key: Key
    position: str
    t: float
    type: str
    fields: dict[str, Any]
    step: int
    """Committed steps when it happened."""
    text: str
    severity: str
    """fault, change or routine."""
    noticed: str = ""
    mesh_s: float | None = None
    """Until the next mesh epoch was formed."""
    commit_s: float | None = None
    """Until the next step was committed."""

    @property
    def id(self) -> str:
        return f"{self.position}/{self.key[1]}"

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "t": self.t,
            "type": self.type,
            "step": self.step,
            "severity": self.severity,
            "text": self.text,
            "noticed": self.noticed,
            "mesh_s": self.mesh_s,
            "commit_s": self.commit_s,
            "fields": self.fields,
        }


@dataclass(slots=True)
class EventHistory:
    """``clean``: applied to what an event says before it is kept."""

    clean: Callable[[Any], Any]
    step: int = 0
    checkpoints: dict[tuple[int, int], tuple[float, int]] = field(default_factory=dict)
    """(step, version) to (t, size in bytes)."""
    drops: deque[ListedEvent] = field(default_factory=lambda: deque(maxlen=500))
    _events: deque[ListedEvent] = field(default_factory=lambda: deque(maxlen=MOST_EVENTS))
    _commits: deque[ListedEvent] = field(default_factory=lambda: deque(maxlen=MOST_COMMITS))
    # Kept apart: a long run's checkpoints would push out the rest.
    _marks: deque[ListedEvent] = field(default_factory=lambda: deque(maxlen=MOST_MARKS))
    _saved: deque[ListedEvent] = field(default_factory=lambda: deque(maxlen=MOST_MARKS))
    _open: list[ListedEvent] = field(default_factory=list)
    _last: Key = ((), -1)
    _terms: int = 0

    def committed(self, position: str, n: int, t: float, step: int, reward: float | None) -> None:
        shown = "" if reward is None else f", reward {reward:.3f}"
        text = f"step {step} committed{shown}"
        fields = {"step": step, "reward_mean": reward}
        self.step = step
        for event in self._open:
            event.commit_s = round(t - event.t, 3)
        self._open.clear()
        key = (position_key(position), n)
        self._put(ListedEvent(key, position, t, "StepCommitted", fields, step, text, "routine"))

    def add(self, position: str, n: int, t: float, event: Mapping[str, Any]) -> None:
        """``event``: a listed event other than a commit, as it was journalled."""
        key = (position_key(position), n)
        if key <= self._last:
            return
        kind = str(event.get("type", ""))
        fields = self.clean({k: v for k, v in event.items() if k not in _HEAD})
        if kind == "RunStarted":
            fields = {}
        happening = ListedEvent(
            key,
            position,
            t,
            kind,
            fields,
            self.step,
            str(event.get("text") or tell({**fields, "type": kind})),
            _severity(kind, event, first_term=self._terms == 0),
            NOTICED.get(str(event.get("how") or event.get("reason") or ""), ""),
        )
        if kind == "TermBegun" and happening.severity == "fault":
            happening.noticed = NEW_LEADER
        self._terms += kind == "TermBegun"
        if kind == "RolledBack":
            self.step = int(event["step"])
        elif kind == "MeshFormed":
            for fault in self._open:
                if fault.mesh_s is None and fault.type != "TermBegun":
                    fault.mesh_s = round(t - fault.t, 3)
        elif kind == "CheckpointRecorded":
            known = (int(event["step"]), int(event["version"]))
            self.checkpoints[known] = (t, int(event.get("size_bytes") or 0))
            if len(self.checkpoints) > 256:
                del self.checkpoints[next(iter(self.checkpoints))]
        elif kind == "TaskDropped":
            self.drops.append(happening)
        if happening.severity == "fault" and kind != "TaskDropped":
            self._open.append(happening)
            del self._open[:-MOST_OPEN]
        self._put(happening)

    def after(
        self,
        key: Key | None,
        *,
        limit: int,
        kinds: str = "all",
        newest: bool = False,
        steps: tuple[int, int] | None = None,
    ) -> list[ListedEvent]:
        """Events after ``key``, oldest first, at most ``limit``; ``newest``: the last ones of them.

        ``kinds``: all, notable (no routine), faults, or marks: of these checkpoints have the room
        that the others leave, and where there are too many for it every n-th. ``steps``: only what
        happened with at least and at most so many steps committed.
        """
        least, most = steps or (0, 1 << 62)
        if kinds == "marks":
            return self._marked(key, limit=limit, newest=newest, least=least, most=most)
        of_kind = _KINDS[kinds]

        def wanted(event: ListedEvent) -> bool:
            return least <= event.step <= most and of_kind(event)

        pools = [self._events, self._commits] if kinds == "all" else [self._events]
        found: list[ListedEvent] = []
        for pool in pools:
            # From the newest backwards: a follower asks for the few that came last.
            backwards = (e for e in reversed(pool) if wanted(e))
            some: list[ListedEvent] = []
            for event in backwards:
                if (key is not None and event.key <= key) or (newest and len(some) == limit):
                    break
                some.append(event)
            found += some
        found.sort(key=lambda e: e.key)
        return found[-limit:] if newest else list(islice(found, limit))

    def _marked(
        self, key: Key | None, *, limit: int, newest: bool, least: int, most: int
    ) -> list[ListedEvent]:
        def chosen(pool: Iterable[ListedEvent]) -> list[ListedEvent]:
            return [e for e in pool if least <= e.step <= most and (key is None or e.key > key)]

        def in_order(events: list[ListedEvent]) -> list[ListedEvent]:
            return sorted(events, key=lambda e: e.key)

        marks = in_order(chosen(self._marks) + chosen(self.drops))
        saved = chosen(self._saved)
        if not newest:
            return in_order(marks + saved)[:limit]
        marks = marks[-limit:]
        room = limit - len(marks)
        return in_order(marks + saved[:: -(-(-len(saved) // room) or 1)]) if room else marks

    def _put(self, event: ListedEvent) -> None:
        if event.key <= self._last:
            return
        self._last = event.key
        (self._commits if event.type == "StepCommitted" else self._events).append(event)
        if event.type == "CheckpointRecorded":
            self._saved.append(event)
        elif event.type in STEERED or (event.severity == "fault" and event.type != "TaskDropped"):
            self._marks.append(event)


def _severity(kind: str, event: Mapping[str, Any], *, first_term: bool) -> str:
    if kind == "MeshBroken" and event.get("reason") == "membership":
        return "change"
    if kind == "WorkerDied" and event.get("how") == "replaced":
        return "change"
    if kind in FAULTS or (kind == "TermBegun" and not first_term):
        return "fault"
    return "routine" if kind in ROUTINE else "change"


_HEAD = frozenset({"position", "n", "t", "type", "after", "counts", "severity", "text"})
_KINDS: dict[str, Callable[[ListedEvent], bool]] = {
    "all": lambda e: True,
    "notable": lambda e: e.severity != "routine",
    "faults": lambda e: e.severity == "fault",
}
