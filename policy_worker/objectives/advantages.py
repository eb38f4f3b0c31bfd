"""Advantages of sequences: rewards compared with those of the group, or of the whole step.

A group's advantages depend on its own rewards and on the step's totals, which every replica gets
with the plan.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.config.sections.training import LossConfig
from policy_worker.objectives.batch import Ints, StepTotals

EPSILON = 1e-4
"""Added to the standard deviation, so that nearly equal rewards do not explode."""
Rewards = NDArray[np.float64]


def advantages_of(
    reward: Rewards, sequences: Ints, totals: StepTotals, config: LossConfig
) -> Rewards:
    """``train.loss.advantage`` and ``train.loss.advantage_norm``: reward [S], group after group -> advantages
    [S]."""
    normalise = config.advantage_norm
    if config.advantage == "group":
        return group_advantages(reward, sequences, normalise=normalise)
    if config.advantage == "leave_one_out":
        return leave_one_out(reward, sequences, normalise=normalise)
    if config.advantage == "group_step":
        scale = totals.within_std + EPSILON if normalise else 1.0
        return group_advantages(reward, sequences, normalise=False) / scale
    return (reward - totals.reward_mean) / (totals.reward_std + EPSILON if normalise else 1.0)


def group_advantages(reward: Rewards, sequences: Ints, *, normalise: bool) -> Rewards:
    """reward [S], group after group, ``sequences`` [G] in each -> advantages [S].

    reward - mean of the group; with ``normalise`` divided by (standard deviation of the group, of a
    sample, + EPSILON). Exactly 0 throughout a group whose rewards are all equal. Sources: GRPO,
    Shao et al., arXiv 2402.03300; without the division: Dr. GRPO, Liu et al., arXiv 2503.20783.
    """
    group = np.repeat(np.arange(len(sequences)), sequences)
    mean = np.bincount(group, reward, len(sequences)) / sequences
    starts = np.cumsum(sequences) - sequences
    lowest = np.minimum.reduceat(reward, starts)
    equal = lowest == np.maximum.reduceat(reward, starts)
    # The mean of equal numbers may differ from them in the last bit.
    centred = np.where(equal[group], 0.0, reward - mean[group])
    if not normalise:
        return centred
    variance = np.bincount(group, centred**2, len(sequences)) / np.maximum(sequences - 1, 1)
    result: Rewards = centred / (np.sqrt(variance) + EPSILON)[group]
    return result


def leave_one_out(reward: Rewards, sequences: Ints, *, normalise: bool) -> Rewards:
    """reward - mean of the group's other rewards: that of group_advantages times n / (n - 1).

    Source: RLOO, Kool et al. 2019; Ahmadian et al., arXiv 2402.14740.
    """
    of_group = np.repeat(sequences, sequences)
    centred = group_advantages(reward, sequences, normalise=normalise)
    result: Rewards = centred * of_group / np.maximum(of_group - 1, 1)
    return result
