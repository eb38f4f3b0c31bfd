"""Schema of a run's configuration.

Each field of a section is followed by its meaning and its unit. Unknown fields are refused. docs/configuration.md
and the comments that `paceline init` writes are generated from these texts.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from paceline.config.fields import Section
from paceline.config.services import (
    AlertsConfig,
    ArchiveConfig,
    AuthConfig,
    ControllerConfig,
    MetricsConfig,
    RedisConfig,
    RestConfig,
    TelemetryConfig,
)
from paceline.config.training import (
    NEED_ANSWERS,
    DataConfig,
    ModelConfig,
    RewardConfig,
    RunConfig,
    TrainConfig,
)
from paceline.config.workers import FleetConfig, KubernetesConfig, RayConfig, RolloutConfig


class Config(Section):
    """A whole run."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig = Field(default_factory=RewardConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    fleet: FleetConfig = Field(default_factory=FleetConfig)
    kubernetes: KubernetesConfig = Field(default_factory=KubernetesConfig)
    ray: RayConfig = Field(default_factory=RayConfig)
    redis: RedisConfig = Field(default_factory=RedisConfig)
    controller: ControllerConfig = Field(default_factory=ControllerConfig)
    rest: RestConfig = Field(default_factory=RestConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    archive: ArchiveConfig = Field(default_factory=ArchiveConfig)
    alerts: AlertsConfig = Field(default_factory=AlertsConfig)
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig)
    auth: AuthConfig = Field(default_factory=AuthConfig)

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.train.warmup_steps > self.train.steps:
            raise ValueError("train.warmup_steps is larger than train.steps")
        if self.rollout.group_size == 1 and self.train.kl_coef == 0:
            raise ValueError(
                "rollout.group_size = 1: an advantage is relative to the other completions of the "
                "prompt, so it is always 0 and nothing is learnt. Set it to 2 or more"
            )
        if self.fleet.heartbeat_s * 2 > self.fleet.lease_ttl_s:
            raise ValueError("fleet.lease_ttl_s must be at least twice fleet.heartbeat_s")
        # An environment may score its samples itself; reward.functions are then not called.
        if self.data.answer_field is None and self.rollout.environment is None:
            for name in self.reward.functions:
                if name in NEED_ANSWERS:
                    raise ValueError(
                        f"{name} compares with the answer: set data.answer_field, or choose other "
                        "reward.functions"
                    )
        return self

    @property
    def longest_completion(self) -> int:
        """Tokens that one sample of a prompt may have. ``max_tokens`` bounds a turn of an environment."""
        if self.rollout.environment is not None and self.rollout.max_context is not None:
            return self.rollout.max_context
        return self.rollout.max_tokens

    @property
    def samples_per_step(self) -> int:
        return self.train.groups_per_step * self.rollout.group_size


SECTIONS: dict[str, type[Section]] = {
    name: info.annotation  # type: ignore[misc]
    for name, info in Config.model_fields.items()
}
