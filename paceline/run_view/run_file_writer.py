"""Run files for people, written by the leader: events.jsonl and metrics.jsonl.

The journal is the truth; these files are its story. Every line carries the journal position it came
from, so whoever leads next goes on where the last complete line ends:

- ``last_position`` is where to replay the journal from; it may lie before the last line.
- ``record`` leaves out what is in the files already, so replaying never writes a line twice.

What happens many times a step (leases, accepted groups, votes) is counted, not listed: the line of
a committed step carries the counts since the step before it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.run_view.json_lines import JsonLinesFile, read_lines

_Key = tuple[tuple[int, ...], int]


class RunFileWriter:
    """Writes the run files of ``run_dir``; one leader at a time, continued by the next."""

    def __init__(self, run_dir: Path) -> None:
        self._events = JsonLinesFile(run_dir / "events.jsonl")
        self._metrics = JsonLinesFile(run_dir / "metrics.jsonl")
        self._counts: Counter[str] = Counter()
        self._position, self._index, self._previous = "", -1, ""
        self._listed, self.last_position = _last_line(run_dir / "events.jsonl")
        self._measured, _ = _last_line(run_dir / "metrics.jsonl")

    last_position: str | None
    """Journal position after which to hand events to ``record``; None: from the beginning."""

    def record(self, position: str, t: float, event: Mapping[str, Any]) -> None:
        """Takes the next journal event, in journal order.

        ``position`` (numbers with any separators) must not fall; several events may share one.
        ``t`` is unix seconds, ``event`` the journalled object with its ``type``.
        """
        if position != self._position:
            self._previous, self._position, self._index = self._position, position, -1
        self._index += 1
        key = (position_key(position), self._index)
        kind = str(event.get("type", ""))
        self._counts[kind] += 1
        if kind in ("StepCommitted", "EvalRecorded"):
            # Before the event's own line: where the process dies between the two, the next
            # leader replays from before both.
            self._measure(key, t, event)
        if not is_listed(event):
            if kind == "TaskDropped":
                self._counts[f"dropped_{event.get('reason', 'unknown')}"] += 1
            return
        if key > self._listed:
            line = {"position": position, "n": self._index, "t": round(t, 3), **_finite(event)}
            if kind == "StepCommitted":
                line["after"] = self._previous
                line["counts"] = dict(self._counts)
            self._events.append(line)
            self._listed = key
        if kind == "StepCommitted":
            self._counts.clear()

    def close(self) -> None:
        self._events.close()
        self._metrics.close()

    def _measure(self, key: _Key, t: float, event: Mapping[str, Any]) -> None:
        if key <= self._measured:
            return
        values = _measurements(event)
        step = int(event.get("step", 0))
        kind = "step" if event["type"] == "StepCommitted" else "eval"
        head = {"position": self._position, "n": key[1], "t": round(t, 3), "kind": kind}
        row = {**head, "step": step, "version": int(event.get("version", 0)), **_finite(values)}
        self._metrics.append(row)
        self._measured = key


def _measurements(event: Mapping[str, Any]) -> dict[str, float]:
    if event["type"] == "StepCommitted":
        metrics = dict(event.get("metrics") or {})
        return {k: float(v) for k, v in metrics.items() if k not in ("step", "version")}
    mean = event.get("reward_mean")
    return {
        "eval_reward_mean": math.nan if mean is None else float(mean),
        "eval_count": float(event.get("count", 0)),
    }


def is_listed(event: Mapping[str, Any]) -> bool:
    """Whether the record has a line of its own in events.jsonl: the controller has put it in words."""
    return "text" in event


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no infinity and no NaN: they become null."""

    def clean(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return None
        if isinstance(value, Mapping):
            return {k: clean(v) for k, v in value.items()}
        return value

    return {name: clean(value) for name, value in values.items()}


def _last_line(path: Path) -> tuple[_Key, str | None]:
    """Key of the last complete line, and where to replay from: before the last committed step."""
    last: _Key = ((), -1)
    resume: str | None = None
    for line in read_lines(path):
        last = (position_key(str(line["position"])), int(line["n"]))
        if "after" in line:
            resume = str(line["after"]) or None
    return last, resume


def position_key(position: str) -> tuple[int, ...]:
    """Orders journal positions."""
    return tuple(int(part) for part in re.findall(r"\d+", position))
