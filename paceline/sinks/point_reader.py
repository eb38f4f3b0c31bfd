"""Points of metrics.jsonl, in order, even if a new leader replaces the file."""

from __future__ import annotations

import json
import re
from collections import deque
from pathlib import Path
from typing import Any

from paceline.run_view.file_tail import FileTail
from paceline.sinks.base import Point, curve_name

EVALS_PER_VERSION = 64
"""Point numbers reserved for the evaluations between two committed steps."""
_HEAD = frozenset({"position", "n", "t", "kind", "step", "version"})
# Points that the sink already holds are skipped without parsing their values.
_LINE = re.compile(
    rb'^\{"position":"[^"]*","n":\d+,"t":[^,]*,"kind":"(\w+)","step":\d+,"version":(\d+)'
)


class PointReader:
    """Follows ``path`` and returns the points numbered above ``after``; None: all points."""

    def __init__(self, path: Path, after: int | None) -> None:
        self._tail = FileTail(path)
        self._after = -1 if after is None else after
        self._lines: deque[bytes] = deque()
        self._number = 0

    def read(self, most: int) -> list[Point]:
        """The next points, at most ``most``; none if the reader is at the end of the file."""
        points: list[Point] = []
        while len(points) < most:
            if not self._lines:
                void, lines = self._tail.read()
                if void:
                    self._number = 0
                self._lines.extend(lines)
                if not lines:
                    break
            point = self._take(self._lines.popleft())
            if point is not None:
                points.append(point)
        return points

    def _take(self, line: bytes) -> Point | None:
        head = _LINE.match(line)
        if head is None:
            return None
        kind, version = head.groups()
        self._number = (
            (int(version) + 1) * EVALS_PER_VERSION if kind == b"step" else self._number + 1
        )
        if self._number <= self._after:
            return None
        self._after = self._number
        return _point(json.loads(line), self._number)


def _point(row: dict[str, Any], number: int) -> Point:
    curves = {
        curve_name(name): float(value)
        for name, value in row.items()
        if name not in _HEAD and isinstance(value, int | float) and not isinstance(value, bool)
    }
    return Point(
        number=number,
        t=float(row["t"]),
        kind=str(row["kind"]),
        step=int(row["step"]),
        version=int(row["version"]),
        curves=curves,
    )
