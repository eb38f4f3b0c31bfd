"""Fake metric sinks, named in a run's config or made in the test."""

import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from paceline.observe.run_files import read_lines
from paceline.observe.sinks.base import ExternalRun, Point


class RecordingSink:
    """Appends a line for each point to ``recorded.jsonl``, also of those that break off in a
    batch."""

    def __init__(self, run: ExternalRun) -> None:
        self._path = run.directory / "recorded.jsonl"
        self._run = run
        self.points_until_failure = -1
        """So many more are written, then ConnectionError; negative: no end."""

    def open(self) -> int | None:
        numbers = [line["number"] for line in read_lines(self._path)]
        return numbers[-1] if numbers else None

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            if self.points_until_failure == 0:
                raise ConnectionError("gone in the middle of a batch")
            self.points_until_failure -= 1
            line = {
                "run": self._run.id,
                "writer": os.getpid(),
                "number": point.number,
                "kind": point.kind,
                "step": point.step,
                "version": point.version,
                "curves": dict(point.curves),
            }
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def close(self, outcome: str | None) -> None:
        if outcome is not None:
            (self._run.directory / "recorded.outcome").write_text(outcome)


class HangingSink:
    """Never comes back from its first write."""

    def __init__(self, run: ExternalRun) -> None:
        self._sign = run.directory / "hanging"

    def open(self) -> int | None:
        return None

    def write(self, points: Sequence[Point]) -> None:
        self._sign.write_text(str(os.getpid()))
        threading.Event().wait()

    def close(self, outcome: str | None) -> None:
        pass


class BrokenSink:
    """Cannot be reached."""

    def __init__(self, run: ExternalRun) -> None:
        self._sign = run.directory / "broken"

    def open(self) -> int | None:
        self._sign.write_text(str(os.getpid()))
        raise ConnectionError("nobody answers at sink.example")

    def write(self, points: Sequence[Point]) -> None:
        raise AssertionError("never open")

    def close(self, outcome: str | None) -> None:
        pass


def recorded(run_dir: Path) -> list[dict]:
    return list(read_lines(run_dir / "recorded.jsonl"))
