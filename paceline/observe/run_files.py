"""Run files: events.jsonl and metrics.jsonl, which survive the death of their writer.

The journal is the source of truth; these files and the links of checkpoints are its readable
record, written by the leader. Every line carries the journal position it came from, so the next
leader continues where the last complete line ends:

- ``last_position`` is where to replay the journal from. It may lie before the last line.
- ``record`` skips what the files already hold, so a replay never writes a line twice.

Events without text (leases, accepted groups, votes) are in no file.
"""

import io
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.errors import BadInput
from paceline.observe.checkpoints import set_links
from paceline.observe.event_history import Key, is_listed, position_key
from paceline.observe.vocabulary import EventType


class DamagedFile(BadInput, ValueError):
    """A complete line is not JSON; the message names file and line."""


class JsonLinesFile:
    """Appends one JSON object per line; on return the operating system has the line. Opening copies
    the file up to its last complete line into a new file that replaces it. A torn last line
    disappears, and an earlier owner that wakes up after it was declared dead writes into an
    unlinked file. If that owner wakes up in the middle of opening, it replaces the file of its
    successor: the successor calls ``keep_place``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._replace(_complete_lines(path))

    def append(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def keep_place(self) -> bool:
        """Puts this file back at its path if it is not there; whether that was so. Owner only."""
        with suppress(FileNotFoundError):
            if os.path.samestat(self.path.stat(), os.fstat(self._file.fileno())):
                return False
        self._file.seek(0)
        lost = self._file
        self._file = self._replace(lost.readall())
        lost.close()
        return True

    def close(self) -> None:
        self._file.close()

    def _replace(self, content: bytes) -> io.FileIO:
        fresh = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        fresh.write_bytes(content)
        file = fresh.open("a+b", buffering=0)
        fresh.replace(self.path)
        return file


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file, without a torn last line; none if it does not exist. Raises
    DamagedFile for any other line that cannot be parsed."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                value = json.loads(line)
            except ValueError:
                told = f"{path}: line {number} is damaged: remove it to continue"
                raise DamagedFile(told) from None
            if isinstance(value, dict):
                yield value


def _complete_lines(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return b""
    return data[: data.rfind(b"\n") + 1]


def metrics_row(event: Mapping[str, Any]) -> dict[str, Any] | None:
    """The row of metrics.jsonl for a committed step or an evaluation; None for other events."""
    head = {"step": int(event.get("step", 0)), "version": int(event.get("version", 0))}
    if event.get("type") == EventType.STEP_COMMITTED:
        values = {
            k: float(v)
            for k, v in (event.get("metrics") or {}).items()
            if k not in head and v is not None
        }
        return {"kind": "step", **head, **finite(values)}
    if event.get("type") == EventType.EVAL_RECORDED:
        mean = event.get("reward_mean")
        scores = {"eval_reward_mean": mean, "eval_count": float(event.get("count", 0))}
        # Of recorded data.
        scores |= {f"eval_{name}": v for name, v in (event.get("measured") or {}).items()}
        for result in event.get("sets") or ():
            named = {"count": float(result["count"]), **result["metrics"]}
            named |= {n: float(result[n]) for n in ("left_out", "failed") if result.get(n)}
            scores |= {f"eval_{result['name']}/{name}": value for name, value in named.items()}
        return {"kind": "eval", **head, **finite(scores)}
    return None


def finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(name): finite(inner) for name, inner in value.items()}
    return [finite(inner) for inner in value] if isinstance(value, list | tuple) else value


class RunFileWriter:
    """Writes the run files of ``run_dir`` for one leader at a time."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._events = JsonLinesFile(run_dir / "events.jsonl")
        self._metrics = JsonLinesFile(run_dir / "metrics.jsonl")
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
        head = {"position": position, "n": self._index, "t": round(t, 3)}
        # Before the event's own line: if the process dies between the two, the next leader replays
        # from before both.
        if key > self._measured and (row := metrics_row(event)) is not None:
            self._metrics.append({**head, **row})
            self._measured = key
        if not is_listed(event):
            return
        if key > self._listed:
            line = {**head, **finite(event)}
            if event.get("type") == EventType.STEP_COMMITTED:
                line["after"] = self._previous
            self._events.append(line)
            self._listed = key
        # Also if the line was there: the leader before may have died between the two.
        set_links(self._run_dir, event)

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
