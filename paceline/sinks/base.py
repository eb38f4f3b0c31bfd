"""The sink protocol and the points that sinks receive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from paceline.config.sections.services import MetricsConfig


@dataclass(frozen=True, slots=True)
class ExternalRun:
    """Identity of the run in an external service. Every leader of the run derives the same one."""

    id: str
    """Derived from the run's name and start time, so that a new leader continues the external run
    and a fresh run of the same name gets its own. Letters, digits and dashes."""
    name: str
    settings: Mapping[str, Any]
    """By dotted name: train.lr."""
    directory: Path
    """The run directory."""
    options: MetricsConfig


@dataclass(frozen=True, slots=True)
class Point:
    """One committed step or one evaluation."""

    number: int
    """Rises with every point, and is the same for every reader."""
    t: float
    """Unix seconds."""
    kind: str
    """step or eval."""
    step: int
    version: int
    """Version of the weights after the step. Never reused, even if a step is trained again."""
    curves: Mapping[str, float]
    """Finite values by curve: train/loss, time/wait_s, queue/ready, eval/reward_mean."""


class Sink(Protocol):
    """A destination for curves, called from a thread of its own.

    Any method may block and may raise. After an error the sink is closed, and a new one is made and
    opened after a pause.
    """

    def open(self) -> int | None:
        """Connects, and continues the external run if there is one.

        Returns the number of the last point it holds; only later points are then written. None: the
        whole curve is written.
        """

    def write(self, points: Sequence[Point]) -> None:
        """Appends points, in order."""

    def close(self, outcome: str | None) -> None:
        """``outcome``: finished or failed if the run has ended; None if another leader continues."""


def curve_name(metric: str) -> str:
    """Name of a metric's curve, grouped by prefix: time/..., queue/..., eval/..., train/..."""
    for prefix in ("time_", "queue_", "eval_"):
        if metric.startswith(prefix):
            return f"{prefix[:-1]}/{metric.removeprefix(prefix)}"
    return f"train/{metric}"
