"""From the names in ``metrics.sinks`` to sinks. A missing package is told at the start, in a sentence."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from paceline.config.load import FLEET_SECTIONS
from paceline.config.schema import Config
from paceline.errors import BadInput
from paceline.sinks.base import ExternalRun, Sink

BUILT_IN = {
    "tensorboard": ("paceline.sinks.tensorboard:TensorBoardSink", None),
    "wandb": ("paceline.sinks.wandb:WandbSink", "wandb"),
    "mlflow": ("paceline.sinks.mlflow:MlflowSink", "mlflow"),
}
"""Name to the class, and the package it needs, which is the extra's name too."""


class NoSink(BadInput):
    """A sink that cannot be: says what is wrong and what to do."""


def check_sinks(config: Config) -> None:
    """Raises NoSink for a sink that is unknown or whose package is not installed. Imports nothing."""
    for name in config.metrics.sinks:
        path, package = BUILT_IN.get(name, (name, None))
        if package is not None and importlib.util.find_spec(package) is None:
            raise NoSink(
                f"metrics.sinks names {name!r}, whose package is not installed: "
                f"pip install 'paceline[{name}]'"
            )
        if ":" not in path:
            raise NoSink(
                f"metrics.sinks: there is no sink {name!r}; choose of {', '.join(BUILT_IN)}, or "
                "name your own as package.module:factory"
            )


def maker(name: str, run: ExternalRun) -> Callable[[], Sink]:
    """Makes the sink of that name, in the thread that will use it: its package may be slow to load.

    A factory of one's own is called with the ExternalRun.
    """

    def make() -> Sink:
        module, _, attribute = BUILT_IN.get(name, (name, None))[0].partition(":")
        return cast(Sink, getattr(importlib.import_module(module), attribute)(run))

    return make


def external_run(config: Config, run_dir: Path, started_t: float) -> ExternalRun:
    """``started_t``: of the run by its ledger, unix seconds: the same for all its leaders."""
    name = config.run.name
    digest = hashlib.sha256(f"{name}@{started_t!r}".encode()).hexdigest()
    shown = config.model_dump(mode="json", include=set(FLEET_SECTIONS))
    return ExternalRun(
        id=f"paceline-{digest[:16]}",
        name=name,
        settings=dict(_flat(shown)),
        directory=run_dir,
        options=config.metrics,
    )


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", value))
    return found
