"""Measured times for a plan: a small TOML file, or the metrics of a finished run."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from paceline.errors import BadInput
from testbed.planner.calibration import MeasuredRun, MeasuredStep

Positive = Annotated[float, Field(gt=0)]
WARM_UP_STEPS = 5
"""First steps of a run, which are left out: engines start, caches fill."""
LEAST_STEPS = 10
EXAMPLE = """\
mean_tokens = 823          # of a completion
[[measured]]               # a synchronous step on all GPUs
gpus = 32
generation_s = 225.7
log_prob_s = 68.0          # 0 if behaviour log-probs are the engine's
update_s = 170.4
[[measured]]
gpus = 64
generation_s = 154.1
log_prob_s = 71.8
update_s = 136.4"""


class _Measured(BaseModel):
    model_config = ConfigDict(extra="forbid")
    gpus: Annotated[int, Field(ge=1)]
    generation_s: Positive
    update_s: Positive
    log_prob_s: Annotated[float, Field(ge=0)] = 0.0
    step_s: Positive | None = None

    @model_validator(mode="after")
    def _whole_holds_its_parts(self) -> _Measured:
        parts = self.generation_s + self.update_s + self.log_prob_s
        if self.step_s is not None and self.step_s < 0.9 * parts:
            raise ValueError(
                f"step_s = {self.step_s:g} is less than its parts, {parts:g} s together"
            )
        return self


class TimesFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    mean_tokens: Positive
    sigma: Annotated[float, Field(ge=0, le=3)] | None = None
    groups_per_step: Annotated[int, Field(ge=1)] | None = None
    group_size: Annotated[int, Field(ge=1)] | None = None
    weights_s: Annotated[float, Field(ge=0)] | None = None
    """From a commit until engines serve its weights."""
    measured: Annotated[list[_Measured], Field(min_length=1)]

    @property
    def steps(self) -> list[MeasuredStep]:
        return [MeasuredStep(**row.model_dump()) for row in self.measured]


def read_times(path: Path) -> TimesFile:
    """Raises BadInput."""
    try:
        return TimesFile.model_validate(tomllib.loads(path.read_text()))
    except OSError as error:
        raise BadInput(f"--times {path}: cannot be read: {error.strerror or error}") from error
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"--times {path}: is no TOML: {error}. An example:\n{EXAMPLE}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "file"
        raise BadInput(
            f"--times {path}: {place}: {first['msg']}. An example:\n{EXAMPLE}"
        ) from error


@dataclass(frozen=True, slots=True)
class RunTimes:
    """A run's means, and the batch that they are of."""

    run: MeasuredRun
    groups: int
    group_size: int
    mean_tokens: float
    cap: int


def read_run(run_dir: Path) -> RunTimes:
    """Means over the steps of a run, without its first ones. Raises BadInput."""
    from paceline.observe.projection import Projection
    from paceline_launcher.cli.common import run_config

    config = run_config(run_dir)
    if config.recorded:
        raise BadInput(f"--from-run {run_dir}: its data is recorded, so it has no engines to plan")
    metrics = Projection.read(run_dir).metrics
    steps = len(metrics) - WARM_UP_STEPS
    if steps < LEAST_STEPS:
        raise BadInput(
            f"--from-run {run_dir}: {len(metrics)} steps are too few: give a run of "
            f"{WARM_UP_STEPS + LEAST_STEPS} or more"
        )

    def mean(name: str) -> float:
        values = [value for _, value in metrics.column(name)[-steps:]]
        if not values:
            raise BadInput(f"--from-run {run_dir}: metrics.jsonl has no {name}")
        return fmean(values)

    ranks, engine = config.fleet.policy_ranks, config.rollout.tensor_parallel
    update = sum(mean(f"time_{part}_s") for part in ("compute", "reduce", "commit"))
    run = MeasuredRun(
        policy_gpus=max(1, round(mean("replicas"))) * ranks,
        rollout_gpus=config.fleet.rollout * engine,
        max_staleness=config.train.max_staleness,
        generate_s=mean("time_generate_s"),
        update_s=update,
        publish_s=mean("time_publish_s"),
        step_s=mean("step_s"),
    )
    return RunTimes(
        run=run,
        groups=config.train.groups_per_step,
        group_size=config.rollout.group_size,
        mean_tokens=mean("response_tokens_mean"),
        cap=config.rollout.max_tokens,
    )


def same_batch(runs: Sequence[RunTimes]) -> RunTimes:
    """The first. Raises BadInput if the runs had different batches."""
    first = runs[0]
    for other in runs[1:]:
        if (other.groups, other.group_size, other.cap) != (
            first.groups,
            first.group_size,
            first.cap,
        ):
            raise BadInput(
                "--from-run: the runs have different train.groups_per_step, rollout.group_size or "
                "rollout.max_tokens: give runs that differ in their number of workers only"
            )
    return first
