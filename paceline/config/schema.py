"""Schema of a run's configuration.

Each field of a section is followed by its meaning and its unit. Unknown fields are refused.
docs/configuration.md and the comments that `paceline init` writes are generated from these texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field, model_validator
from pydantic.fields import FieldInfo

from paceline.config.algorithms import FAMILY
from paceline.config.built_in_rewards import BUILT_IN_REWARDS
from paceline.config.fields import Section, table_of
from paceline.config.ignored_settings import problem_of_ignored
from paceline.config.recorded import problem_of_recorded, with_group_size
from paceline.config.sections.evaluation import EvaluationConfig, problem_of_evaluation
from paceline.config.sections.objectives import (
    BUILT_IN,
    DistillOptions,
    ObjectiveConfig,
    problem_of,
)
from paceline.config.sections.preference_objectives import PREFERENCES, problem_of_preferences
from paceline.config.sections.scorers import (
    ScorerConfig,
    ScorersConfig,
    problem_of_scorers,
    workers_of,
)
from paceline.config.sections.services import (
    AlertsConfig,
    ArchiveConfig,
    AuthConfig,
    ControllerConfig,
    MetricsConfig,
    PayloadsConfig,
    RedisConfig,
    RestConfig,
    TelemetryConfig,
)
from paceline.config.sections.training import (
    DataConfig,
    ModelConfig,
    RewardConfig,
    RunConfig,
    TrainConfig,
)
from paceline.config.sections.workers import FleetConfig, KubernetesConfig, RayConfig, RolloutConfig

AUTO_FANOUT = 2
"""Of relays that the user has not asked for: a replica sends two copies at most, and the way to the
last of n receivers is log2(n) relays long. A chain sends one, and each of its relays that fails
holds up all below it."""


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
    controller: ControllerConfig = Field(default_factory=ControllerConfig)
    rest: RestConfig = Field(default_factory=RestConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    archive: ArchiveConfig = Field(default_factory=ArchiveConfig)
    alerts: AlertsConfig = Field(default_factory=AlertsConfig)
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig)
    auth: AuthConfig = Field(default_factory=AuthConfig)

    @model_validator(mode="before")
    @classmethod
    def _sized(cls, raw: Any) -> Any:
        return with_group_size(raw) if isinstance(raw, Mapping) else raw

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if problem := problem_of(self.train.algorithm, self.objective.options):
            raise ValueError(problem)
        if problem := problem_of_scorers(
            self.scorers.by_name,
            [
                *self.reward.functions,
                *(name for one in self.evaluation.sets.values() for name in one.reward or ()),
            ],
            self.train.loss.reference,
            self.fleet.scorers,
        ):
            raise ValueError(problem)
        if self.recorded and self.train.loss.reference != "model":
            raise ValueError(
                "train.loss.reference: scorers are asked about sampled completions, and rollout.source = recorded has none. Set "
                'train.loss.reference = "model"'
            )
        if self.train.algorithm == "distill" and (problem := self._problem_of_distillation()):
            raise ValueError(problem)
        if problem := problem_of_evaluation(self.data, self.evaluation, recorded=self.recorded):
            raise ValueError(problem)
        if self.train.steps is not None and self.train.optimizer.warmup_steps > self.train.steps:
            raise ValueError("train.optimizer.warmup_steps is larger than train.steps")
        if self.train.max_samples is not None and self.train.max_samples < self.samples_per_step:
            raise ValueError(
                f"train.max_samples = {self.train.max_samples} is less than one step, which has "
                f"{self.samples_per_step} samples (train.groups_per_step x rollout.group_size)"
            )
        if self.train.memory.offload_activations and not self.model.gradient_checkpointing:
            raise ValueError(
                "train.memory.offload_activations moves what gradient checkpointing keeps, and model.gradient_checkpointing is false. "
                "Set model.gradient_checkpointing = true"
            )
        if problem := problem_of_recorded(self.train.algorithm, self.data, self.rollout):
            raise ValueError(problem)
        if self.recorded and self.train.filter_uninformative:
            raise ValueError(
                "train.filter_uninformative would drop recorded rows, whose rewards say nothing: remove it"
            )
        train, group_size = self.train, self.rollout.group_size
        if self.data.curriculum is not None and (self.recorded or group_size == 1):
            why = 'rollout.source = "recorded"' if self.recorded else "rollout.group_size = 1"
            raise ValueError(
                f"data.curriculum compares the rewards of a prompt's sampled completions, and with {why} there are none "
                "to compare: remove it"
            )
        if problem := problem_of_preferences(
            train.algorithm, group_size, train.loss.kl_coef, train.filter_uninformative
        ):
            raise ValueError(problem)
        if (
            group_size == 1
            and train.algorithm not in (*PREFERENCES, "distill")
            and not self.recorded
        ):
            self._check_groups_of_one()
        if problem := problem_of_ignored(train):
            raise ValueError(problem)
        if self._option("kl_controller") == "adaptive" and train.loss.kl_coef == 0:
            raise ValueError(
                "objective.kl_controller = adaptive: it multiplies train.loss.kl_coef, which is 0. Set train.loss.kl_coef above 0"
            )
        if self.reward.overlong_buffer >= self.longest_completion:
            raise ValueError(
                f"reward.overlong_buffer = {self.reward.overlong_buffer} is not below rollout.{self.length_setting} = "
                f"{self.longest_completion}, so every completion would lose reward: set it to a part of the limit"
            )
        if self.fleet.heartbeat_s * 2 > self.fleet.lease_ttl_s:
            raise ValueError("fleet.lease_ttl_s must be at least twice fleet.heartbeat_s")
        # An environment may score its samples itself; reward.functions are then not called.
        scored = self.rollout.environment is None and not self.recorded
        if self.data.answer_field is None and scored:
            for name in self.reward.functions:
                if name in BUILT_IN_REWARDS:
                    raise ValueError(
                        f"{name} compares with the answer: set data.answer_field, or choose other "
                        "reward.functions"
                    )
        return self

    @property
    def length_setting(self) -> str:
        """Field of ``[rollout]`` that bounds one sample of a prompt. ``max_tokens`` bounds a turn
        of an environment."""
        in_context = self.rollout.environment is not None and self.rollout.max_context is not None
        return "max_context" if in_context else "max_tokens"

    def _check_groups_of_one(self) -> None:
        compared = self.train.algorithm in FAMILY and self.train.loss.advantage != "step"
        if compared and self.train.loss.kl_coef == 0:
            raise ValueError(
                "rollout.group_size = 1: an advantage is relative to the other completions of the "
                "prompt, so it is always 0 and nothing is learnt. Set it to 2 or more, or train.algorithm = ppo"
            )
        if self.train.filter_uninformative:
            raise ValueError(
                "train.filter_uninformative with rollout.group_size = 1: the rewards of a group of one are all equal, so "
                "every group would be dropped. Set train.filter_uninformative = false"
            )

    @property
    def critic_path(self) -> str | None:
        """Model of the critic, if the objective has one and it is not model.path."""
        path = self._option("critic_path")
        return path if isinstance(path, str) and path != "none" else None

    def _option(self, name: str) -> object:
        """An option of a built-in objective; None if it has no such option."""
        return self.objective.options.get(name) if self.train.algorithm in BUILT_IN else None

    @property
    def recorded(self) -> bool:
        """Completions are in the data: no engine runs, and no weights are published."""
        return self.rollout.source == "recorded"

    @property
    def weights_through_host(self) -> bool:
        """Weights travel between host memories: relays keep them there, and vLLM's ranks take them
        from there."""
        return self.relay_fanout > 0 or self.rollout.engine == "vllm"

    @property
    def relay_fanout(self) -> int:
        """Of rollout.relay_fanout, the number; 0: no relays."""
        chosen = self.rollout.relay_fanout
        if chosen != "auto":
            return chosen
        return AUTO_FANOUT if self.rollout.engine == "vllm" else 0

    def _problem_of_distillation(self) -> str:
        teacher = str(self.objective.options.get("teacher", DistillOptions().teacher))
        scorer = self.scorers.by_name.get(teacher)
        if scorer is None or scorer.kind != "logprobs":
            return (
                f"train.algorithm = distill: the teacher is a scorer of kind logprobs, and there is none named "
                f"{teacher!r}. Add a section [scorers.{teacher}], or name another in objective.teacher"
            )
        if self.train.filter_uninformative:
            return (
                "train.filter_uninformative drops groups by their rewards, which distillation does not use: set it "
                "to false"
            )
        return ""

    @property
    def longest_completion(self) -> int:
        """Tokens that one sample of a prompt may have."""
        return int(getattr(self.rollout, self.length_setting))

    @property
    def longest_sequence(self) -> int:
        """Tokens that a prompt may have together with a completion, unless the model takes fewer."""
        rollout = self.rollout
        return rollout.max_context or self.data.max_prompt_tokens + rollout.max_tokens

    @property
    def scorer_workers(self) -> dict[str, int]:
        """Desired workers of each scorer at the start of the run."""
        return workers_of(self.scorers.by_name, self.fleet.scorers)

    @property
    def samples_per_step(self) -> int:
        return self.train.groups_per_step * self.rollout.group_size


def _sections(model: type[Section], prefix: str = "") -> Iterator[tuple[str, type[Section]]]:
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            yield f"{prefix}{name}", info.annotation
            yield from _sections(info.annotation, f"{prefix}{name}.")


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

RENAMED: dict[str, str] = {
    f"train.{name}": f"{section}.{name}"
    for section, model in SECTIONS.items()
    if section.startswith("train.")
    for name in model.model_fields
}
"""Settings of [train] in earlier releases, which had no tables in it, and their names now."""


def with_new_names(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Sections that an earlier release has stored, with the names that settings have now."""
    train = sections.get("train")
    if not isinstance(train, Mapping):
        return dict(sections)
    nested: dict[str, Any] = {}
    for name, value in train.items():
        *tables, leaf = RENAMED.get(f"train.{name}", f"train.{name}").split(".")[1:]
        if tables:
            nested.setdefault(tables[0], {})[leaf] = value
        elif isinstance(value, Mapping):
            nested.setdefault(leaf, {}).update(value)
        else:
            nested[leaf] = value
    return {**sections, "train": nested}
