"""Published runs of published.toml: synchronous steps, and gains of asynchronous runs."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.planner.calibration import MeasuredStep
from testbed.planner.lengths import Lengths
from testbed.planner.system import Accelerator, Batch, EngineTime, ModelSize, StageTime, System


@dataclass(frozen=True, slots=True)
class Asynchronous:
    """One published asynchronous row."""

    policy_gpus: int
    rollout_gpus: int
    max_staleness: float
    published: float
    """Synchronous step time divided by the asynchronous one."""
    updates_per_version: int = 1
    synchronous_log_prob: bool = True
    """The synchronous run recomputes behaviour log-probs."""
    asynchronous_log_prob: bool = False
    against_staleness: float | None = None
    """The row's ratio is to a disaggregated run of this staleness, not to a synchronous one."""
    control: bool = False
    """A case in which asynchrony gains little or nothing. Only the sign of the gain counts."""

    @property
    def name(self) -> str:
        gpus = f"{self.policy_gpus} policy, {self.rollout_gpus} rollout"
        return f"{gpus}, staleness {self.max_staleness:g}"


@dataclass(frozen=True, slots=True)
class PublishedSystem:
    kind: str
    """Kind of its evidence."""
    name: str
    source: str
    assumed: str
    gpu: Accelerator
    bare: System
    """The system before calibration."""
    active: float
    """Parameters that one token uses."""
    rows: tuple[MeasuredStep, ...]
    asynchronous: tuple[Asynchronous, ...]
    like: str | None = None
    """Name of the system whose training scales in the same way, if this one has a single
    synchronous row."""


def published_systems() -> tuple[PublishedSystem, ...]:
    tables = tomllib.loads(Path(__file__).with_name("published.toml").read_text())
    gpus = {name: Accelerator(*figures) for name, figures in tables["gpus"].items()}
    return tuple(_system(table, gpus[table["gpu"]]) for table in tables["systems"])


def _system(table: dict[str, Any], gpu: Accelerator) -> PublishedSystem:
    lengths, model, tp = table["lengths"], ModelSize(**table["model"]), table["tp"]
    drawn = Lengths.of_mean(**lengths) if "mean" in lengths else Lengths(**lengths)
    engine = EngineTime.of(model, gpu, tp, 0.0)
    batch = Batch(**table["batch"], lengths=drawn)
    return PublishedSystem(
        **{name: table[name] for name in ("kind", "name", "source", "assumed")},
        gpu=gpu,
        bare=System(batch, engine, tp, StageTime(0), StageTime(0), table["pause_s"]),
        active=model.active,
        rows=tuple(MeasuredStep(**row) for row in table["synchronous"]),
        asynchronous=tuple(Asynchronous(**row) for row in table["asynchronous"]),
        like=table.get("like"),
    )
