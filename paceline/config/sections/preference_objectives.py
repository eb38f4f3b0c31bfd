"""Options of the preference objectives: pairs, KTO and the reward model. docs/algorithms.md has the
formulas."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from paceline.config.fields import Section

Strength = Annotated[float, Field(gt=0)]
Coefficient = Annotated[float, Field(ge=0)]
FlipRate = Annotated[float, Field(ge=0, lt=0.5)]

DpoLoss = Literal[
    "sigmoid",
    "sigmoid_norm",
    "hinge",
    "ipo",
    "ipo_norm",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
]


class PairOptions(Section):
    """Options of every objective of pairs."""

    pairs: Literal["best_worst", "all"] = "best_worst"
    """Pairs of a group, by reward. best_worst: one, the best completion and the worst. all:
    disjoint pairs, the best with the worst, the second best with the second worst, and so on.
    Completions of equal reward make no pair."""


class DpoOptions(PairOptions):
    """Options of dpo and online_dpo."""

    beta: Strength = 0.1
    """Inverse temperature of the implicit reward: higher keeps the policy closer to the reference.
    """
    loss: DpoLoss = "sigmoid"
    """Loss of a pair."""
    label_smoothing: FlipRate = 0.0
    """Share of pairs whose preference is taken to be flipped. It is used by sigmoid, robust and
    exo_pair, which needs one."""
    discopop_tau: Strength = 0.05
    """Temperature of discopop's blend of its two losses."""
    sft_coef: Coefficient = 0.0
    """Weight of the chosen completion's mean negative log-prob per token, added to the loss of a
    pair."""

    @model_validator(mode="after")
    def _smoothed(self) -> DpoOptions:
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
    """Weight of the chosen completion's mean negative log-prob per token, added to the loss of a
    pair."""


class OrpoOptions(PairOptions):
    """Options of orpo."""

    beta: Coefficient = 0.1
    """Weight of the odds-ratio loss, lambda in the paper, beside the chosen completion's mean
    negative log-prob."""


class KtoOptions(Section):
    """Options of kto."""

    beta: Strength = 0.1
    """Inverse temperature of the implicit reward: higher keeps the policy closer to the reference.
    """
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
    """The score of the chosen completion must be higher by the difference of the two rewards, which
    recorded pairs take from their margin field."""
    center_coef: Coefficient = 0.0
    """Weight of the squared sum of a pair's scores, which keeps scores near 0. 0.01 is usual."""


PREFERENCES: dict[str, type[Section]] = {
    "dpo": DpoOptions,
    "online_dpo": DpoOptions,
    "ipo": IpoOptions,
    "orpo": OrpoOptions,
    "kto": KtoOptions,
    "reward_model": RewardModelOptions,
}
"""Objectives of preferences by name, with their options."""


def problem_of_preferences(
    algorithm: str, group_size: int, kl_coef: float, filter_uninformative: bool
) -> str:
    """Why an objective of preferences cannot train with these settings; empty if it can, or if it
    is another one."""
    if algorithm not in PREFERENCES:
        return ""
    if issubclass(PREFERENCES[algorithm], PairOptions) and group_size < 2:
        return (
            f"train.algorithm = {algorithm} compares two completions of a prompt, and rollout.group_size = {group_size}: "
            'set it to 2 or more to compare sampled completions, or rollout.source to "recorded" for pairs of a file'
        )
    if kl_coef > 0:
        return (
            f"train.loss.kl_coef is not used by {algorithm}: set it to 0. If the objective compares with the reference, "
            "objective.beta says how closely the policy follows it"
        )
    if algorithm == "kto" and filter_uninformative:
        return (
            "train.filter_uninformative drops groups whose rewards are all equal, and kto learns from each completion "
            "alone: set it to false"
        )
    return ""
