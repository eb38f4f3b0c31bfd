"""Schema of a run's configuration.

Each field of a section is followed by its meaning and its unit. Unknown fields are refused.
docs/configuration.md and the comments that `paceline init` writes are generated from these texts.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field, model_validator
from pydantic.fields import FieldInfo

from paceline.config.fields import RowForm, Section, section_of, table_of
from paceline.config.objectives import BUILT_IN, BuiltIn
from paceline.config.rules import problem
from paceline.config.sections.evaluation import EvaluationConfig
from paceline.config.sections.inputs import DataConfig, ModelConfig, RewardConfig
from paceline.config.sections.objective_options import ObjectiveConfig
from paceline.config.sections.scorers import ScorerConfig, ScorersConfig
from paceline.config.sections.services import (
    AlertsConfig,
    ArchiveConfig,
    AuthConfig,
    ControllerConfig,
    MetricsConfig,
    PayloadsConfig,
    RedisConfig,
    RestConfig,
    WeightsConfig,
)
from paceline.config.sections.training import RunConfig, TrainConfig
from paceline.config.sections.workers import FleetConfig, KubernetesConfig, RayConfig, RolloutConfig
from paceline.errors import BadInput, plural

MOST = float(1 << 62)
"""Magnitude of every number in a configuration; the ranges of settings are narrower."""
AUTO_FANOUT = 2
"""A replica sends two copies, and the last of n receivers is log2(n) relays away. In a chain, a
relay that fails holds up all below it."""


class Config(Section):
    """A whole run."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig = Field(default_factory=RewardConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    scorers: ScorersConfig = Field(default_factory=lambda: ScorersConfig.model_validate({}))
    fleet: FleetConfig = Field(default_factory=FleetConfig)
    kubernetes: KubernetesConfig = Field(default_factory=KubernetesConfig)
    ray: RayConfig = Field(default_factory=RayConfig)
    redis: RedisConfig = Field(default_factory=RedisConfig)
    payloads: PayloadsConfig = Field(default_factory=PayloadsConfig)
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    controller: ControllerConfig = Field(default_factory=ControllerConfig)
    rest: RestConfig = Field(default_factory=RestConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    archive: ArchiveConfig = Field(default_factory=ArchiveConfig)
    alerts: AlertsConfig = Field(default_factory=AlertsConfig)
    auth: AuthConfig = Field(default_factory=AuthConfig)

    @model_validator(mode="before")
    @classmethod
    def _sized(cls, raw: Any) -> Any:
        return _with_group_size(raw) if isinstance(raw, Mapping) else raw

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        # Those in tables that no field describes, too.
        for name, number in _numbers(self.model_dump()):
            if not abs(number) < MOST:  # NaN is not either
                raise ValueError(f"{name} = {number!r:.40}: give a finite number below {MOST:g}")
        if text := problem(self):
            raise ValueError(text)
        return self

    @property
    def built_in(self) -> BuiltIn | None:
        return BUILT_IN.get(self.train.algorithm)

    @property
    def length_setting(self) -> str:
        """Field of ``[rollout]`` that bounds one sample of a prompt."""
        in_context = self.rollout.environment is not None and self.rollout.max_context is not None
        return "max_context" if in_context else "max_tokens"

    @property
    def critic_path(self) -> str | None:
        """Model of the critic, if the objective has one and it is not model.path."""
        path = self.option("critic_path")
        return path if isinstance(path, str) and path != "none" else None

    def option(self, name: str) -> object:
        """An option of a built-in objective; None if it has no such option."""
        return self.objective.options.get(name) if self.built_in else None

    @property
    def recorded(self) -> bool:
        """Completions are in the data: no engine runs, and no weights are published."""
        return self.rollout.source == "recorded"

    @property
    def takes_turns(self) -> bool:
        """Policy replica N and rollout worker N have the same device, one after the other."""
        return self.fleet.sharing != "none"

    def scorer_shares(self, name: str) -> bool:
        """The workers of a scorer are on the devices of pairs."""
        scorer = self.scorers.by_name[name]
        return self.fleet.sharing == "turns" and scorer.path is not None and scorer.takes_turns

    @property
    def relay_fanout(self) -> int:
        """rollout.relay_fanout as a number; 0: no relays."""
        chosen = self.rollout.relay_fanout
        if self.weights.url is not None:
            return 0
        if chosen != "auto":
            return chosen
        return AUTO_FANOUT if self.rollout.engine == "vllm" else 0

    @property
    def longest_completion(self) -> int:
        """Tokens that one sample of a prompt may have."""
        return int(getattr(self.rollout, self.length_setting))

    @property
    def longest_sequence(self) -> int:
        """Tokens of prompt and completion, unless the model takes fewer."""
        rollout = self.rollout
        return rollout.max_context or self.data.max_prompt_tokens + rollout.max_tokens

    @property
    def most_branches(self) -> int:
        """Sequences of a sample: one if the objective compares completions."""
        compares = self.built_in is not None and self.built_in.preference
        return 1 if compares else self.rollout.max_branches

    @property
    def scorer_workers(self) -> dict[str, int]:
        """Desired workers of each scorer at the start of the run: 1 if a table has no number."""
        counts = self.fleet.scorers
        numbers = (
            counts if isinstance(counts, dict) else dict.fromkeys(self.scorers.by_name, counts)
        )
        return {name: numbers.get(name, 1) for name in self.scorers.by_name}

    @property
    def samples_per_step(self) -> int:
        return self.train.groups_per_step * self.rollout.group_size


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a configuration by dotted name."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _numbers(inner, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _numbers(inner, name)


def _with_group_size(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """``raw`` sections with the group size of recorded rows, unless they name one."""
    rollout, data = raw.get("rollout"), raw.get("data")
    if not isinstance(rollout, dict) or rollout.get("source") != "recorded":
        return raw
    if "group_size" in rollout:
        return raw
    named = data if isinstance(data, dict) else data.model_dump() if data is not None else {}
    form = RowForm.PAIR if named.get("chosen_field") not in (None, "none") else RowForm.COMPLETION
    return {**raw, "rollout": {**rollout, "group_size": form.completions}}


def _sections(model: type[Section], prefix: str = "") -> Iterator[tuple[str, type[Section]]]:
    for name, info in model.model_fields.items():
        if (section := section_of(info)) is not None:
            yield f"{prefix}{name}", section
            yield from _sections(section, f"{prefix}{name}.")


SECTIONS: dict[str, type[Section]] = dict(_sections(Config))  # type: ignore[type-abstract]
"""Sections by dotted name, those of ``train`` after it: "train", "train.optimizer", ..."""

SETTINGS: dict[str, FieldInfo] = {
    f"{section}.{name}": info
    for section, model in SECTIONS.items()
    for name, info in model.model_fields.items()
    if f"{section}.{name}" not in SECTIONS
}
"""Settings by dotted name. Those of scorers, sources and evaluation sets are in ``TABLES``."""

TABLES: dict[str, type[Section]] = {
    "scorers": ScorerConfig,
    **{name: table for name, info in SETTINGS.items() if (table := table_of(info)) is not None},
}
"""Sections of the tables [NAME.USER'S NAME], by the dotted name of what holds them."""


def run_steps(config: Config, rows: int) -> int:
    """Steps of a run over ``rows`` training rows. Raises BadInput if the warm-up is longer."""
    train = config.train
    if train.epochs is not None:
        # The product of a fraction like 0.1 may be a little above the whole number that is meant.
        prompts = train.epochs * rows * (1 - 1e-12)
        steps = max(1, math.ceil(prompts / train.groups_per_step))
        said = f"train.epochs = {train.epochs:g} over {plural(rows, 'row')}"
    elif train.max_samples is not None:
        steps = train.max_samples // config.samples_per_step
        said = f"train.max_samples = {train.max_samples}"
    else:
        assert train.steps is not None
        return train.steps
    if train.optimizer.warmup_steps > steps:
        raise BadInput(
            f"train.optimizer.warmup_steps = {train.optimizer.warmup_steps} is larger than the "
            f"run, which has {plural(steps, 'step')} ({said})"
        )
    return steps


def length_in_words(config: Config, rows: int) -> str:
    """ "96 steps of 32 groups x 8 completions: 24,576 samples, 3 epochs of 1,024 rows"."""
    train, steps = config.train, run_steps(config, rows)
    groups = steps * train.groups_per_step
    return (
        f"{plural(steps, 'step')} of {plural(train.groups_per_step, 'group')} x "
        f"{plural(config.rollout.group_size, 'completion')}: "
        f"{plural(steps * config.samples_per_step, 'sample')}, {round(groups / rows, 2):,g} "
        f"epochs of {plural(rows, 'row')}"
    )
