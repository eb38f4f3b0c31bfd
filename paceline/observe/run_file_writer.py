"""Writer of the run files: events.jsonl, metrics.jsonl and the links of checkpoints.

The journal is the source of truth; these files are its readable record, written by the leader.
Every line carries the journal position it came from, so the next leader continues where the last
complete line ends:

- ``last_position`` is where to replay the journal from. It may lie before the last line.
- ``record`` skips what the files already hold, so a replay never writes a line twice.

Events without text (leases, accepted groups, votes) are counted, not listed: the line of a
committed step carries the counts since the step before it.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.observe import checkpoint_links
from paceline.observe.event_history import Key, is_listed, position_key
from paceline.observe.json_lines import JsonLinesFile, finite, metrics_row, read_lines
from paceline.observe.vocabulary import EventType


class RunFileWriter:
    """Writes the run files of ``run_dir`` for one leader at a time."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._events = JsonLinesFile(run_dir / "events.jsonl")
        self._metrics = JsonLinesFile(run_dir / "metrics.jsonl")
        self._counts: Counter[str] = Counter()
        self._position, self._index, self._previous = "", -1, ""
        self._place = position_key("")
        self._listed, self.last_position = _last_line(run_dir / "events.jsonl")
        self._measured, _ = _last_line(run_dir / "metrics.jsonl")

    last_position: str | None
    """Journal position after which to hand events to ``record``; None: from the beginning."""

    def record(self, position: str, t: float, event: Mapping[str, Any]) -> None:
        """Takes the next event record, in journal order. ``position`` (numbers with any separators)
        must not fall; several events may share one. ``t`` is in Unix seconds."""
        if position != self._position:
            self._previous, self._position, self._index = self._position, position, -1
            self._place = position_key(position)
        self._index += 1
        key = (self._place, self._index)
        kind = str(event.get("type", ""))
        self._counts[kind] += 1
        head = {"position": position, "n": self._index, "t": round(t, 3)}
        # Before the event's own line: if the process dies between the two, the next leader replays
        # from before both.
        if key > self._measured and (row := metrics_row(event)) is not None:
            self._metrics.append({**head, **row})
            self._measured = key
        if not is_listed(event):
            if kind == EventType.TASK_DROPPED:
                self._counts[f"dropped_{event.get('reason', 'unknown')}"] += 1
            return
        if key > self._listed:
            line = {**head, **finite(event)}
            if kind == EventType.STEP_COMMITTED:
                line["after"] = self._previous
                line["counts"] = dict(self._counts)
            self._events.append(line)
            self._listed = key
        # Also if the line was there: the leader before may have died between the two.
        checkpoint_links.follow(self._run_dir, event)
        if kind == EventType.STEP_COMMITTED:
            self._counts.clear()

    def keep_place(self) -> bool:
        """Puts the files of this writer back at their paths; whether others lay there."""
        back = [file.keep_place() for file in (self._events, self._metrics)]
        return any(back)

    def close(self) -> None:
        self._events.close()
        self._metrics.close()


def _last_line(path: Path) -> tuple[Key, str | None]:
    """Key of the last complete line, and where to replay from: before the last committed step."""
    last: Key = ((), -1)
    resume: str | None = None
    for line in read_lines(path):
        last = (position_key(str(line["position"])), int(line["n"]))
        if "after" in line:
            resume = str(line["after"]) or None
    return last, resume
