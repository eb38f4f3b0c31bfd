"""Advantages: rewards compared with those of the group, or of the whole step, by sequence and by
token.

A group's advantages depend on its own rewards and on the step's totals, which every replica gets
with the plan. If tokens or turns have rewards of their own, advantages are by token:

- ``train.loss.advantage`` group and leave_one_out: process supervision of GRPO. A token's advantage
  is that of the sequence, from what is left of its reward without those of tokens, plus the sum of
  the token rewards from this token to the end, each compared with the mean of all token rewards of
  the group. Source: DeepSeekMath, arXiv 2402.03300, section 4.1.3.
- step and group_step: the reward to go, compared as whole rewards are: what a sequence got before a
  token is no reason to have chosen it. Source: REINFORCE++, arXiv 2501.03262, with no discount.

A sample has one advantage, and its sequences have it in common. What a token's own path got before
it, in the sequence or in what a branch shares, is no reason to have chosen it; what the sample's
other tokens got, before or after, counts as a part of the whole.
"""

import numpy as np
from numpy.typing import NDArray

from paceline.config.sections.training import LossConfig
from policy_worker.objectives.batch import Ints, StepTotals, TokenBatch

EPSILON = 1e-4
"""Added to the standard deviation, so that nearly equal rewards do not explode."""
Rewards = NDArray[np.float64]


def advantages_of(
    reward: Rewards, samples: Ints, totals: StepTotals, config: LossConfig
) -> Rewards:
    """reward [N], of samples, group after group -> advantages [N], by ``train.loss.advantage``."""
    normalise = config.advantage_norm
    if config.advantage == "group":
        return group_advantages(reward, samples, normalise=normalise)
    if config.advantage == "leave_one_out":
        return leave_one_out(reward, samples, normalise=normalise)
    if config.advantage == "group_step":
        scale = totals.within_std + EPSILON if normalise else 1.0
        return group_advantages(reward, samples, normalise=False) / scale
    return (reward - totals.reward_mean) / (totals.reward_std + EPSILON if normalise else 1.0)


def group_advantages(reward: Rewards, samples: Ints, *, normalise: bool) -> Rewards:
    """reward [N], group after group, ``samples`` [G] in each -> advantages [N]. reward - mean of
    the group; with ``normalise`` divided by (standard deviation of the group, of a sample, +
    EPSILON). Exactly 0 throughout a group whose rewards are all equal. Sources: GRPO, Shao et al.,
    arXiv 2402.03300; without the division: Dr. GRPO, Liu et al., arXiv 2503.20783."""
    group = np.repeat(np.arange(len(samples)), samples)
    mean = np.bincount(group, reward, len(samples)) / samples
    starts = np.cumsum(samples) - samples
    lowest = np.minimum.reduceat(reward, starts)
    equal = lowest == np.maximum.reduceat(reward, starts)
    # The mean of equal numbers may differ from them in the last bit.
    centred = np.where(equal[group], 0.0, reward - mean[group])
    if not normalise:
        return centred
    variance = np.bincount(group, centred**2, len(samples)) / np.maximum(samples - 1, 1)
    result: Rewards = centred / (np.sqrt(variance) + EPSILON)[group]
    return result


def leave_one_out(reward: Rewards, samples: Ints, *, normalise: bool) -> Rewards:
    """reward - mean of the group's other rewards: that of group_advantages times n / (n - 1).
    Source: RLOO, Kool et al. 2019; Ahmadian et al., arXiv 2402.14740."""
    of_group = np.repeat(samples, samples)
    centred = group_advantages(reward, samples, normalise=normalise)
    result: Rewards = centred * of_group / np.maximum(of_group - 1, 1)
    return result


def token_advantages(batch: TokenBatch, totals: StepTotals, config: LossConfig) -> Rewards:
    """-> [S], or [C] if a token of the batch has a reward of its own."""
    reward = batch.reward[batch.firsts]
    if not len(batch.rewarded):
        return advantages_of(reward, batch.samples, totals, config)[batch.sample_of]
    if config.advantage in ("group", "leave_one_out"):
        left = _levelled(reward - _by_sample(batch, batch.token_reward), batch)
        whole = advantages_of(left, batch.samples, totals, config)[batch.sample_of]
        steps = _compared(batch, normalise=config.advantage_norm)
        others = _by_sample(batch, steps)[batch.sample_of] - _by_sequence(batch, steps)
        others -= on_prefixes(batch, steps)
        return np.repeat(whole + others, batch.length) + _to_end(batch, steps)
    compared = advantages_of(reward, batch.samples, totals, config)[batch.sample_of]
    deviation = totals.reward_std if config.advantage == "step" else totals.within_std
    # Whole rewards that are all equal say nothing of the scale of their parts.
    scale = deviation + EPSILON if config.advantage_norm and deviation else 1.0
    got = on_prefixes(batch, batch.token_reward) + _by_sequence(batch, batch.token_reward)
    before = np.repeat(got, batch.length) - _to_end(batch, batch.token_reward)
    found: Rewards = np.repeat(compared, batch.length) - before / scale
    return found


def on_prefixes(batch: TokenBatch, values: Rewards) -> Rewards:
    """values [R] of rewarded tokens -> [S]: their sums over what each path shares with earlier
    sequences of its sample."""
    found = np.zeros(len(batch.length))
    starts = np.cumsum(batch.length) - batch.length
    for sequence in np.flatnonzero(batch.parent >= len(batch.sequences)):
        parent = batch.parent[sequence] - len(batch.sequences)
        cut = starts[parent] + batch.prefix[sequence] - batch.prefix[parent]
        first, end = np.searchsorted(batch.rewarded, [starts[parent], cut])
        found[sequence] = found[parent] + values[first:end].sum()
    return found


def _levelled(left: Rewards, batch: TokenBatch) -> Rewards:
    """Without rounding errors of the subtraction: they would be divided by one another."""
    size = np.abs(batch.reward[batch.firsts]) + _by_sample(batch, np.abs(batch.token_reward))
    found: Rewards = np.where(np.abs(left) <= 1e-12 * size, 0.0, left)
    return found


def _compared(batch: TokenBatch, *, normalise: bool) -> Rewards:
    """[R]: token rewards less the group's mean; with ``normalise`` over their deviation."""
    group = batch.group_of[_sequence_of(batch)]
    groups = len(batch.sequences)
    count = np.bincount(group, minlength=groups)
    mean = np.bincount(group, batch.token_reward, groups) / np.maximum(count, 1)
    centred: Rewards = batch.token_reward - mean[group]
    if not normalise:
        return centred
    variance = np.bincount(group, centred**2, groups) / np.maximum(count - 1, 1)
    found: Rewards = centred / (np.sqrt(variance) + EPSILON)[group]
    return found


def _sequence_of(batch: TokenBatch) -> NDArray[np.int64]:
    """[R]: the sequence of each rewarded token."""
    ends = np.cumsum(batch.length)
    return np.searchsorted(ends, batch.rewarded, side="right")


def _by_sequence(batch: TokenBatch, values: Rewards) -> Rewards:
    """[R] -> [S]: sums."""
    found = np.zeros(len(batch.length))
    np.add.at(found, _sequence_of(batch), values)
    return found


def _by_sample(batch: TokenBatch, values: Rewards) -> Rewards:
    """[R] -> [N]: sums over all sequences of a sample."""
    return np.add.reduceat(_by_sequence(batch, values), batch.firsts)


def _to_end(batch: TokenBatch, values: Rewards) -> Rewards:
    """[R] -> [C]: at each token, the sum from it to the end of its sequence."""
    dense = np.zeros(len(batch.tokens))
    dense[batch.rewarded] = values
    found = np.empty_like(dense)
    # One sequence at a time: another's numbers leave no rounding error in it, whatever batch it is
    # in.
    for end, length in zip(np.cumsum(batch.length), batch.length, strict=True):
        part = slice(end - length, end)
        found[part] = np.cumsum(dense[part][::-1])[::-1]
    return found
