"""Trace file in Chrome's trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing
open. Lanes are processes of the trace, rows its threads; times are whole microseconds."""

import gzip
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.observe.timeline import PROCESS, ROLES, RUN, STEPS, WORK, Item, Mark, Point, Slice

ROWS = (PROCESS, STEPS, WORK)  # Of a lane, before the others


class TraceWriter:
    """Writes items as they come, after ``begin``. A name that ends in .gz is compressed. The file
    is there once the context is left without an error."""

    def __init__(self, path: Path) -> None:
        self.counts: Counter[str] = Counter()  # Of events by their phase: X, i, s, f, M
        self._path, self._fresh = path, path.with_name(f".{path.name}.{os.getpid()}")
        self._start = 0.0
        self._roles: Mapping[str, str] = {}
        self._numbers: dict[tuple[str, ...], int] = {}  # By lane, or by lane and row
        opened: Any = gzip.open if path.suffix.lower() == ".gz" else open
        self._file = opened(self._fresh, "wt", encoding="utf-8")

    def __enter__(self) -> "TraceWriter":
        self._file.write('{"displayTimeUnit":"ms","traceEvents":[')
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with self._file:
                self._file.write(f'\n],"otherData":{{"start_unix_s":{self._start}}}}}\n')
            if kind is None:
                self._fresh.replace(self._path)
        finally:
            self._fresh.unlink(missing_ok=True)

    def begin(self, start: float, roles: Mapping[str, str]) -> None:
        """Nothing before ``start`` (Unix seconds) is written, and slices that go on then are cut.
        ``roles``: role of each lane, as ``Timeline.roles``."""
        self._start, self._roles = start, roles

    def write(self, item: Item) -> None:
        if isinstance(item, Slice):
            start, end = self._ts(item.start), self._ts(item.end)
            if start < end or item.start >= self._start:
                about = {**item.about, **({"waits for": item.owner} if item.owner else {})}
                what = {"name": item.name, "cat": item.kind, "dur": end - start, "args": about}
                self._put("X", Point(item.lane, item.row, item.start), what)
        elif isinstance(item, Mark):
            if item.t >= self._start:
                scope, row = ("g", STEPS) if item.lane == RUN else ("p", PROCESS)
                what = {"name": item.text, "cat": item.severity, "s": scope}
                self._put("i", Point(item.lane, row, item.t), what)
        elif item.start.t >= self._start:  # else its first slice may be cut away
            kind = item.name.partition(" ")[0]
            what = {"name": item.name, "cat": kind, "id": self.counts["s"], "bp": "e"}
            self._put("s", item.start, what)
            self._put("f", item.end, what)

    def _ts(self, t: float) -> int:
        return round(max(0.0, t - self._start) * 1e6)

    def _put(self, phase: str, at: Point, what: Mapping[str, Any]) -> None:
        order = (*ROLES, "").index(self._roles.get(at.lane, ""))
        pid = self._number("process", (at.lane,), order, {})
        order = ROWS.index(at.row) if at.row in ROWS else len(ROWS)
        tid = self._number("thread", (at.lane, at.row), order, {"pid": pid})
        self._line({"ph": phase, "ts": self._ts(at.t), "pid": pid, "tid": tid, **what})

    def _number(self, kind: str, name: tuple[str, ...], order: int, of: Mapping[str, int]) -> int:
        """Number of a lane or a row, which is named when it is seen first."""
        if (known := self._numbers.get(name)) is not None:
            return known
        number = self._numbers[name] = len(self._numbers) + 1
        place = {"ph": "M", **of, "pid" if kind == "process" else "tid": number}
        sorted_by = {"sort_index": order * 1_000_000 + number}
        self._line({**place, "name": f"{kind}_name", "args": {"name": name[-1]}})
        self._line({**place, "name": f"{kind}_sort_index", "args": sorted_by})
        return number

    def _line(self, event: Mapping[str, Any]) -> None:
        comma = "," if self.counts.total() else ""
        self.counts[str(event["ph"])] += 1
        self._file.write(f"{comma}\n{json.dumps(event, separators=(',', ':'))}")
