"""Points from metrics.jsonl: each once, in order, also when a new leader replaces the file."""

from __future__ import annotations

import json
import re
from collections import deque
from pathlib import Path
from typing import Any

from paceline.run_view.file_tail import FileTail
from paceline.run_view.run_file_writer import position_key
from paceline.sinks.base import Key, Point, curve_name

ROOM = 64
"""Numbers for evaluations between two commits."""
_HEAD = frozenset({"position", "n", "t", "kind", "step", "version"})
# Points before the place to begin at are passed over without reading their values.
_LINE = re.compile(
    rb'^\{"position":"([^"]*)","n":(\d+),"t":[^,]*,"kind":"(\w+)","step":\d+,"version":(\d+)'
)


class PointReader:
    """Follows ``path`` behind ``after``; None: from its beginning."""

    def __init__(self, path: Path, after: Key | None) -> None:
        self._tail = FileTail(path)
        self._after = after
        self._lines: deque[bytes] = deque()
        self._number = 0

    def read(self, most: int) -> list[Point]:
        """The next points, at most ``most``; none: the end is reached for now."""
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
        position, n, kind, version = head.groups()
        if kind == b"step":
            self._number = (int(version) + 1) * ROOM
        else:
            self._number += 1
        key = position_key(position.decode()), int(n)
        if self._after is not None and key <= self._after:
            return None
        self._after = key
        return _point(json.loads(line), self._number)


def _point(row: dict[str, Any], number: int) -> Point:
    curves = {
        curve_name(name): float(value)
        for name, value in row.items()
        if name not in _HEAD and isinstance(value, int | float) and not isinstance(value, bool)
    }
    return Point(
        place=f"{row['position']}/{row['n']}",
        number=number,
        t=float(row["t"]),
        kind=str(row["kind"]),
        step=int(row["step"]),
        version=int(row["version"]),
        curves=curves,
    )
