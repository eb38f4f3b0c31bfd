"""Totals of a step: sums over all of its groups, which every replica gets with the plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.ids import Step, Version
from paceline.v1 import policy_pb2


@dataclass(frozen=True, slots=True)
class StepTotals:
    """The totals that all members of a step share."""

    step: Step
    version: Version
    """Of the state before the step."""
    tokens: int
    sequences: int
    """With a token that is trained."""
    version_epochs: tuple[tuple[int, int], ...] = ()
    """(first_version, offset) of each VersionEpoch of the plan."""
    oldest_step: Step = Step(0)
    """Tokens of states before it are masked; ``tokens`` does not count them."""
    samples: int = 0
    """All sequences of the step."""
    reward_sum: float = 0.0
    reward_squares: float = 0.0
    """Sum of the squares of each reward's difference from the mean of all. (Sums of plain squares
    would lose the deviation of large rewards that are close to one another.)"""
    within_squares: float = 0.0
    """Sum of the squares of each reward's difference from the mean of its group."""

    @property
    def reward_mean(self) -> float:
        return self.reward_sum / max(self.samples, 1)

    @property
    def reward_std(self) -> float:
        """Of a sample, over all sequences of the step."""
        return math.sqrt(self.reward_squares / max(self.samples - 1, 1))

    @property
    def within_std(self) -> float:
        """Of a sample, of the differences from the means of the groups: their mean over the step is
        0."""
        return math.sqrt(self.within_squares / max(self.samples - 1, 1))

    @property
    def token_age(self) -> int:
        """Age of the oldest tokens that are not masked."""
        return self.step - 1 - self.oldest_step

    @classmethod
    def of(cls, plan: policy_pb2.StepPlan) -> StepTotals:
        epochs = tuple((epoch.first_version, epoch.offset) for epoch in plan.version_epochs)
        step, version = Step(plan.step), Version(plan.version)
        totals = plan.total_tokens, plan.total_sequences
        rewards = plan.reward_sum, plan.reward_squares, plan.within_squares
        oldest = Step(plan.oldest_step)
        return cls(step, version, *totals, epochs, oldest, plan.total_samples, *rewards)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StepTotals:
        """From asdict() that has gone through JSON."""
        epochs = tuple(tuple(epoch) for epoch in value["version_epochs"])
        return cls(**{**value, "version_epochs": epochs})
