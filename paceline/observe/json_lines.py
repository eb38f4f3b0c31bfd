"""JSON-lines files that survive the death of their writer, and the rows of metrics.jsonl."""

import io
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import BadInput
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
        try:
            if os.path.samestat(self.path.stat(), os.fstat(self._file.fileno())):
                return False
        except FileNotFoundError:
            pass
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
    for number, line in enumerate(_complete_lines(path).splitlines(), start=1):
        try:
            value = json.loads(line)
        except ValueError:
            raise DamagedFile(f"{path}: line {number} is damaged: remove it to continue") from None
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
