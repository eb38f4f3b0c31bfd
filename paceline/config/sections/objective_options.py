"""Options of the built-in objectives, for ``[objective]``. docs/algorithms.md has the formulas."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from paceline.config.fields import OBJECTIVE, Fixed, LocalPath, NonNegative, Positive, Section

Strength = Annotated[float, Field(gt=0)]
Coefficient = Annotated[float, Field(ge=0)]
FlipRate = Annotated[float, Field(ge=0, lt=0.5)]

# fmt: off
DpoLoss = Literal[
    "sigmoid", "sigmoid_norm", "hinge", "ipo", "ipo_norm", "robust", "exo_pair", "nca_pair",
    "bco_pair", "sppo_hard", "apo_zero", "apo_down", "discopop",
]
# fmt: on


class ObjectiveConfig(Section):
    """The options of the objective that train.algorithm names."""

    model_config = ConfigDict(extra="allow")
    change = Fixed(OBJECTIVE)

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class NoOptions(Section):
    """An objective whose settings are those of ``[train]``."""


class DistillOptions(Section):
    """On-policy distillation (docs/scorers.md)."""

    teacher: str = "teacher"
    """Scorer, of kind logprobs, whose distribution the policy learns."""
    most_advantage: Annotated[float, Field(gt=0)] = 10.0
    """Largest magnitude of a token's advantage, log teacher - log policy, in nats."""


class PpoOptions(Section):
    critic_path: LocalPath | None = None
    """Model that the critic starts from: a sequence classifier with one label, or a causal language
    model, whose head is replaced by zeros. It has the tokenizer of model.path. Default:
    model.path."""
    critic_lr_scale: Annotated[float, Field(gt=0)] = 10.0
    """Learning rate of the critic, as a multiple of train.optimizer.lr."""
    value_coef: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the value loss. It matters only if train.optimizer.max_grad_norm clips."""
    value_clip: Annotated[float, Field(gt=0)] | None = 0.2
    """Range around the value before the step in which the value loss takes values. A step makes one
    update, so it never binds. none disables it."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of rewards, per token."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Lambda of generalised advantage estimation. 1: the return minus the value."""
    value_pretraining_steps: NonNegative = 0
    """First steps, which train the critic only."""
    whiten_advantages: bool = True
    """Normalise advantages by the mean and standard deviation of earlier steps."""
    whiten_rewards: bool = False
    """Divide token rewards by their standard deviation in earlier steps."""
    moments_decay: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """How much the moments of whitening keep of a step with each later one."""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """fixed: train.loss.kl_coef. adaptive: it starts there, and moves towards kl_target."""
    kl_target: Annotated[float, Field(gt=0)] = 6.0
    """KL to the reference that the adaptive controller aims at, in nats per completion."""
    kl_horizon: Positive = 10_000
    """Slowness of the adaptive controller: a step of n completions multiplies the coefficient by 1
    + n / kl_horizon x (relative error of the KL, at most 0.2)."""


class PairOptions(Section):
    """Options of every objective of pairs."""

    pairs: Literal["best_worst", "all"] = "best_worst"
    """Pairs of a group. best_worst: one, of the highest and the lowest reward. all: the best with
    the worst, the second best with the second worst, and so on. Equal rewards make no pair."""


class DpoOptions(PairOptions):
    """Options of dpo and online_dpo."""

    beta: Strength = 0.1
    """Inverse temperature: higher keeps the policy closer to the reference."""
    loss: DpoLoss = "sigmoid"
    """Loss of a pair."""
    label_smoothing: FlipRate = 0.0
    """Share of pairs taken to be flipped, in sigmoid, robust and exo_pair, which needs it."""
    discopop_tau: Strength = 0.05
    """Temperature of discopop's blend of its two losses."""
    sft_coef: Coefficient = 0.0
    """Weight of the chosen completion's mean negative log-prob per token."""

    @model_validator(mode="after")
    def _smoothed(self) -> "DpoOptions":
        if self.loss == "exo_pair" and self.label_smoothing == 0:
            raise ValueError(
                "objective.loss = exo_pair compares with a preference that is a little unsure: set "
                "objective.label_smoothing above 0; the paper has 0.001"
            )
        return self


class IpoOptions(PairOptions):
    """Options of ipo."""

    beta: Strength = 0.1
    """Regularisation: the difference of log-ratios is drawn to 1 / (2 beta)."""
    length_average: bool = False
    """Mean log-probs over each completion instead of sums, as TRL has it. It needs another beta."""
    sft_coef: Coefficient = 0.0
    """Weight of the chosen completion's mean negative log-prob per token."""


class OrpoOptions(PairOptions):
    """Options of orpo."""

    beta: Coefficient = 0.1
    """Weight of the odds-ratio loss, lambda in the paper."""


class KtoOptions(Section):
    """Options of kto."""

    beta: Strength = 0.1
    """Inverse temperature: higher keeps the policy closer to the reference."""
    desirable_weight: Coefficient = 1.0
    """Weight of desirable completions, to balance their number."""
    undesirable_weight: Coefficient = 1.0
    """Weight of undesirable completions."""
    threshold: float = 0.0
    """A completion is desirable if its reward is above this."""
    baseline: Coefficient = 0.0
    """Reference point: the log-ratio, in nats a completion, that counts as neutral."""


class RewardModelOptions(PairOptions):
    """Options of reward_model."""

    margin: bool = False
    """The chosen score must be higher by the difference of the rewards (data.margin_field)."""
    center_coef: Coefficient = 0.0
    """Weight of the squared sum of a pair's scores, which keeps scores near 0. 0.01 is usual."""
