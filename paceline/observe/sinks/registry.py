"""Registry of metric sinks, by the names used in ``metrics.sinks``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import cast

from paceline.config.changes import flat_settings
from paceline.config.load import FLEET_SECTIONS, ConfigError
from paceline.config.schema import Config
from paceline.masking import masked_settings
from paceline.observe.sinks.base import ExternalRun, Sink

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
