"""Metrics of committed steps as columns of numbers, downsampled to curves."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

MOST_ROWS = 400_000
"""Above this, every second row of the older half is dropped: about 100 MB with 30 metrics."""
HEAD = frozenset({"position", "n", "t", "kind", "step", "version"})
RATE_STEPS = 20  # The time left is estimated from so many of the newest steps


class MetricStore:
    """Rows in order of steps. A step that is trained again after a rollback replaces its row."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.versions = array("q")
        self.times = array("d")
        self._values: dict[str, array[float]] = {}
        """Columns as long as ``steps``; NaN: not measured."""

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def names(self) -> list[str]:
        return sorted(self._values)

    def column(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of the finite values of a metric, in order of steps."""
        pairs = zip(self.steps, self._values.get(name, array("d")), strict=False)
        return [(step, value) for step, value in pairs if math.isfinite(value)]

    def append(self, row: Mapping[str, Any]) -> None:
        """``row``: a line of metrics.jsonl."""
        step = int(row["step"])
        self.cut(step - 1)
        self.steps.append(step)
        self.versions.append(int(row.get("version") or 0))
        self.times.append(float(row.get("t") or 0.0))
        measured = {k: v for k, v in row.items() if not (k in HEAD or isinstance(v, bool | str))}
        for name in [name for name in measured if name not in self._values]:
            self._values[name] = array("d", [math.nan]) * (len(self.steps) - 1)
        for name, column in self._values.items():
            value = measured.get(name)
            column.append(math.nan if value is None else value)
        if len(self.steps) > MOST_ROWS:
            for column in self._columns():
                del column[: len(column) // 2 : 2]

    def rows(self, since: int, limit: int) -> list[dict[str, Any]]:
        """At most ``limit`` rows after step ``since``, oldest first; since < 0: the newest."""
        end = len(self.steps)
        start = max(0, end - limit) if since < 0 else bisect_right(self.steps, since)
        columns: dict[str, array[Any]] = {"step": self.steps, "version": self.versions}
        columns |= {"t": self.times, **self._values}
        return [
            {n: None if math.isnan(column[i]) else column[i] for n, column in columns.items()}
            for i in range(start, min(end, start + limit))
        ]

    def curves(
        self, names: Sequence[str], *, since: int, until: int, points: int
    ) -> dict[str, Any]:
        """Curves of at most ``points`` points over the steps after ``since`` up to ``until``. Each
        point stands for a bucket of rows: its last step and time, the mean of its values, and their
        lowest and highest, so that no spike is lost. A value is None if none was measured."""
        import numpy as np  # 0.1 s: only curves need it

        first = bisect_right(self.steps, since)
        last = max(first, bisect_right(self.steps, until))
        count = last - first
        spans = min(count, points)
        starts = (np.arange(spans) * count) // max(1, spans)
        ends = first + np.append(starts[1:], count) - 1 if count else starts
        found: dict[str, Any] = {
            "x": [self.steps[end] for end in ends],
            "t": [self.times[end] for end in ends],
            "series": {},
            "low": {},
            "high": {},
        }
        for name in filter(self._values.__contains__, names):
            values = np.array(self._values[name][first:last])
            if count <= points:
                found["series"][name] = _listed(values)
                continue
            known = ~np.isnan(values)
            sums = np.add.reduceat(np.where(known, values, 0.0), starts)
            number = np.add.reduceat(known.astype(np.float64), starts)
            with np.errstate(invalid="ignore", divide="ignore"):
                found["series"][name] = _listed(sums / number)
            found["low"][name] = _listed(np.fmin.reduceat(values, starts))
            found["high"][name] = _listed(np.fmax.reduceat(values, starts))
        return found

    def _columns(self) -> Iterable[array[Any]]:
        return (self.steps, self.versions, self.times, *self._values.values())

    def cut(self, step: int) -> None:
        """Drops the rows after ``step``."""
        if self.steps and step < self.steps[-1]:
            length = bisect_right(self.steps, step)
            for column in self._columns():
                del column[length:]


def _listed(values: np.ndarray[Any, Any]) -> list[float | None]:
    return [v if math.isfinite(v) else None for v in values.tolist()]


def duration(seconds: float) -> str:
    """A duration in two units: 42 s, 3 min 05 s, 2 h 07 min, 3 d 04 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"
