"""What a sink is: three methods, called from one thread that is its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from paceline.config.schema import MetricsConfig
from paceline.run_view.run_file_writer import position_key

Key = tuple[tuple[int, ...], int]
"""Journal position and number within it: orders points."""


@dataclass(frozen=True, slots=True)
class ExternalRun:
    """The run as others know it. Every leader of the run makes the same one."""

    id: str
    """From the run's name and start: a new leader goes on with it, a fresh run of the same name
    does not. Letters, digits and dashes."""
    name: str
    settings: Mapping[str, Any]
    """By dotted name: train.lr."""
    directory: Path
    """The run directory."""
    options: MetricsConfig


@dataclass(frozen=True, slots=True)
class Point:
    """One committed step, or one evaluation."""

    place: str
    """``position/n`` in the journal: the same whoever reads it."""
    number: int
    """Rises with every point, and is the same whoever reads it."""
    t: float
    """Unix seconds."""
    kind: str
    """step or eval."""
    step: int
    version: int
    """Of the weights after the step: never used twice, also where a step is trained again."""
    curves: Mapping[str, float]
    """Finite values by curve: train/loss, time/wait_s, queue/ready, eval/reward_mean."""

    @property
    def key(self) -> Key:
        return key_of(self.place)


class Sink(Protocol):
    """A place for curves. Any method may take its time, and may raise: then everything from
    ``open`` on is tried again later."""

    def open(self) -> str | None:
        """Connects, and goes on with the external run where there is one.

        Returns the place of the last point in it, so that none is written twice; None: it is empty.
        """

    def write(self, points: Sequence[Point]) -> None:
        """Appends points, in order. What was written survives the death of this process."""

    def close(self, outcome: str | None) -> None:
        """``outcome``: finished or failed where the run has ended; None where another leader goes on."""


def key_of(place: str) -> Key:
    position, _, number = place.partition("/")
    return position_key(position), int(number)


def curve_name(metric: str) -> str:
    """Groups curves: time/..., queue/..., eval/..., train/..."""
    for prefix in ("time_", "queue_", "eval_"):
        if metric.startswith(prefix):
            return f"{prefix[:-1]}/{metric.removeprefix(prefix)}"
    return f"train/{metric}"
