"""The sink protocol and the points that sinks receive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from paceline.config.sections.services import MetricsConfig
from paceline.observe.curves import HEAD
from paceline.observe.event_history import position_key

EVALS_PER_VERSION = 64  # point numbers reserved for the evaluations between two committed steps


@dataclass(frozen=True, slots=True)
class ExternalRun:
    """Identity of the run in an external service. Every leader of the run derives the same one."""

    id: str
    """Derived from the run's name and start time, so that a new leader continues the external run
    and a fresh run of the same name gets its own. Letters, digits and dashes."""
    name: str
    settings: Mapping[str, Any]  # by dotted name: train.optimizer.lr
    directory: Path
    options: MetricsConfig


@dataclass(frozen=True, slots=True)
class Point:
    number: int  # rises with every point, and is the same for every reader
    t: float  # Unix seconds
    kind: str  # step or eval
    step: int
    version: int
    """Version of the weights after the step. Never reused, even if a step is trained again."""
    curves: Mapping[str, float]
    """Finite values by curve: train/loss, time/wait_s, queue/ready, eval/reward_mean."""


class Sink(Protocol):
    """A destination for curves, called from a thread of its own. Any method may block and may
    raise. After an error the sink is closed, and a new one is made and opened after a pause."""

    def open(self) -> int | None:
        """Connects, and continues the external run if there is one. Returns the number of the last
        point it holds; only later points are then written. None: the whole curve is written."""

    def write(self, points: Sequence[Point]) -> None:
        """Appends points, in order."""

    def close(self, outcome: str | None) -> None:
        """``outcome``: finished or failed if the run has ended; None if another leader goes on."""


def curve_name(metric: str) -> str:
    """Name of a metric's curve, grouped by prefix: time/..., queue/..., eval/..., train/..."""
    group, _, name = metric.partition("_")
    return f"{group}/{name}" if name and group in ("time", "queue", "eval") else f"train/{metric}"


class Points:
    """Points of rows of metrics.jsonl, which come in order and may come twice."""

    def __init__(self, after: int | None) -> None:
        """``after``: number of the last point that is not wanted; None: all are."""
        self._after = -1 if after is None else after
        self._number = 0
        self._last: tuple[tuple[int, ...], int] = ((), -1)

    def of(self, rows: Iterable[Mapping[str, Any]]) -> Iterator[Point]:
        for row in rows:
            key = position_key(str(row["position"])), int(row["n"])
            if key <= self._last:
                continue
            self._last = key
            is_step = row["kind"] == "step"
            number = (int(row["version"]) + 1) * EVALS_PER_VERSION if is_step else self._number + 1
            self._number = number
            if number > self._after:
                self._after = number
                yield _point(number, row)


def _point(number: int, row: Mapping[str, Any]) -> Point:
    curves = {
        curve_name(name): float(value)
        for name, value in row.items()
        if name not in HEAD and type(value) in (int, float)
    }
    kind, step, version = str(row["kind"]), int(row["step"]), int(row["version"])
    return Point(number, float(row["t"]), kind, step, version, curves)
