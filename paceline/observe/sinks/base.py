"""Metric sinks by the names used in ``metrics.sinks``, their protocol, and the points that they
receive."""

import hashlib
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from paceline.config.changes import flat_settings
from paceline.config.load import FLEET_SECTIONS, ConfigError
from paceline.config.schema import Config
from paceline.config.sections.services import MetricsConfig
from paceline.masking import masked_settings
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
            kind, version = str(row["kind"]), int(row["version"])
            number = (version + 1) * EVALS_PER_VERSION if kind == "step" else self._number + 1
            self._number = number
            if number <= self._after:
                continue
            self._after = number
            curves = {}
            for metric, value in row.items():
                if metric not in HEAD and type(value) in (int, float):
                    # Grouped by prefix: time/..., queue/..., eval/..., train/...
                    group, _, name = metric.partition("_")
                    grouped = name and group in ("time", "queue", "eval")
                    curves[f"{group}/{name}" if grouped else f"train/{metric}"] = float(value)
            yield Point(number, float(row["t"]), kind, int(row["step"]), version, curves)


BUILT_IN = {
    "tensorboard": ("paceline.observe.sinks.tensorboard:TensorBoardSink", None),
    "wandb": ("paceline.observe.sinks.wandb:WandbSink", "wandb"),
    "mlflow": ("paceline.observe.sinks.mlflow:MlflowSink", "mlflow"),
}
"""Name to the class and the package it needs, which is also the name of the extra."""


def check_sinks(config: Config) -> None:
    """Raises ConfigError if a sink is unknown or its package is not installed. Imports nothing."""
    for name in config.metrics.sinks:
        path, package = BUILT_IN.get(name, (name, None))
        if package is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"metrics.sinks names {name!r}, whose package is not installed: "
                f"pip install 'paceline[{name}]'"
            )
        if ":" not in path:
            raise ConfigError(
                f"metrics.sinks: there is no sink {name!r}. Choose from {', '.join(BUILT_IN)}, or "
                "name your own as package.module:factory"
            )


def sink_maker(name: str, run: ExternalRun) -> Callable[[], Sink]:
    """A function that makes the sink of that name. It is called in the sink's own thread, because
    the sink's package may be slow to import. A user-defined factory is called with the
    ExternalRun."""

    def make() -> Sink:
        module, _, attribute = BUILT_IN.get(name, (name, None))[0].partition(":")
        return cast(Sink, getattr(importlib.import_module(module), attribute)(run))

    return make


def external_run(config: Config, run_dir: Path, started_t: float) -> ExternalRun:
    """``started_t``: the run's start in its ledger, unix seconds: the same for all its leaders."""
    name = config.run.name
    digest = hashlib.sha256(f"{name}@{started_t!r}".encode()).hexdigest()
    sections = config.model_dump(mode="json", include=set(FLEET_SECTIONS))
    return ExternalRun(
        id=f"paceline-{digest[:16]}",
        name=name,
        settings=dict(flat_settings(masked_settings(sections))),
        directory=run_dir,
        options=config.metrics,
    )
