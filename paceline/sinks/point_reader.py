"""Points of metrics.jsonl, in order, even if a new leader replaces the file."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from paceline.observe.curves import HEAD
from paceline.observe.file_tail import FileTail
from paceline.sinks.base import Point, curve_name

EVALS_PER_VERSION = 64
"""Point numbers reserved for the evaluations between two committed steps."""


class PointReader:
    """Follows ``path`` and returns the points numbered above ``after``; None: all points."""

    def __init__(self, path: Path, after: int | None) -> None:
        self._tail = FileTail(path)
        self._after = -1 if after is None else after
        self._number = 0
        self._points = self._follow()

    def read(self, most: int) -> list[Point]:
        """The next points, at most ``most``; none if the reader is at the end of the file."""
        points = list(islice(self._points, most))
        if len(points) < most:
            self._points = self._follow()
        return points

    def _follow(self) -> Iterator[Point]:
        for void, row in self._tail.records():
            number = 1 if void else self._number + 1
            if row["kind"] == "step":
                number = (int(row["version"]) + 1) * EVALS_PER_VERSION
            self._number = number
            if number <= self._after:
                continue
            self._after = number
            yield Point(
                number=number,
                t=float(row["t"]),
                kind=str(row["kind"]),
                step=int(row["step"]),
                version=int(row["version"]),
                curves={
                    curve_name(name): float(value)
                    for name, value in row.items()
                    if name not in HEAD and type(value) in (int, float)
                },
            )
