"""End of a run and the time that it took, from its events: also for a run without a supervisor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.observe.json_lines import read_lines
from paceline.observe.vocabulary import EventType

Status = Literal["", "finished", "failed", "interrupted"]
ENDS: Mapping[str, Status] = {EventType.RUN_FINISHED: "finished", EventType.RUN_FAILED: "failed"}
"""Status of a run after each event that ends it for good."""
_PAUSES: Mapping[str, Status] = {
    EventType.RUN_SUSPENDED: "interrupted",
    EventType.RUN_CONTINUED: "",
}


@dataclass(frozen=True, slots=True)
class RunEnd:
    status: Status
    """Empty while the run goes on, or if it was killed."""
    reason: str
    took_s: float | None
    """Time of all sessions, without the pauses between them; None without any event."""


def run_end(run_dir: Path) -> RunEnd:
    """Raises DamagedFile if the events cannot be read."""
    status: Status = ""
    reason = ""
    took_s, last = 0.0, None
    path = run_dir / "events.jsonl"
    for event in read_lines(path) if path.is_file() else ():
        kind, t = str(event.get("type")), float(event.get("t") or 0.0)
        if kind in ENDS or kind in _PAUSES:
            status = ENDS[kind] if kind in ENDS else _PAUSES[kind]
            reason = str(event.get("reason") or "") if status else ""
        # A leader without a failover: the first one of a session.
        begins = kind == EventType.TERM_BEGUN and not event.get("failover")
        if last is not None and not begins:
            took_s += max(0.0, t - last)
        last = t
    return RunEnd(status, reason, None if last is None else took_s)
