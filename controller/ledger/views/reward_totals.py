"""Totals of a step's rewards, from the facts of its groups."""

from collections.abc import Collection
from dataclasses import dataclass
from math import fsum

from controller.ledger.specs import GroupMeta


@dataclass(frozen=True, slots=True)
class RewardTotals:
    samples: int
    total: float
    squares: float  # Of each reward's difference from the mean of all
    within: float  # Of each reward's difference from the mean of its group, squared


def reward_totals(groups: Collection[GroupMeta]) -> RewardTotals:
    """The same bits in whatever order the groups are."""
    samples = sum(g.sequences for g in groups)
    total = fsum(g.sequences * g.reward_mean for g in groups)
    mean = total / max(samples, 1)
    within = fsum(g.sequences * g.reward_std**2 for g in groups)
    between = fsum(g.sequences * (g.reward_mean - mean) ** 2 for g in groups)
    return RewardTotals(samples, total, within + between, within)
