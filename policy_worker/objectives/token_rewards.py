"""Advantages by token, of sequences whose tokens or turns have rewards of their own.

- ``train.loss.advantage`` group and leave_one_out: process supervision of GRPO. A token's advantage is
  that of the sequence, from what is left of its reward without those of tokens, plus the sum of the
  token rewards from this token to the end, each compared with the mean of all token rewards of the
  group. Source: DeepSeekMath, arXiv 2402.03300, section 4.1.3.
- step and group_step: the reward to go, compared as whole rewards are: what a sequence got before a
  token is no reason to have chosen it. Source: REINFORCE++, arXiv 2501.03262, with no discount.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.config.sections.training import LossConfig
from policy_worker.objectives.advantages import EPSILON, advantages_of
from policy_worker.objectives.batch import StepTotals, TokenBatch

Floats64 = NDArray[np.float64]


def token_advantages(batch: TokenBatch, totals: StepTotals, config: LossConfig) -> Floats64:
    """-> [S], or [C] if a token of the batch has a reward of its own."""
    if not len(batch.rewarded):
        return advantages_of(batch.reward, batch.sequences, totals, config)
    if config.advantage in ("group", "leave_one_out"):
        left = batch.reward - _by_sequence(batch, batch.token_reward)
        whole = advantages_of(_levelled(left, batch), batch.sequences, totals, config)
        steps = _compared(batch, normalise=config.advantage_norm)
        return np.repeat(whole, batch.length) + _to_end(batch, steps)
    compared = advantages_of(batch.reward, batch.sequences, totals, config)
    deviation = totals.reward_std if config.advantage == "step" else totals.within_std
    # Whole rewards that are all equal say nothing of the scale of their parts.
    scale = deviation + EPSILON if config.advantage_norm and deviation else 1.0
    got = _by_sequence(batch, batch.token_reward)
    before = np.repeat(got, batch.length) - _to_end(batch, batch.token_reward)
    found: Floats64 = np.repeat(compared, batch.length) - before / scale
    return found


def _levelled(left: Floats64, batch: TokenBatch) -> Floats64:
    """Differences that are rounding errors of the subtraction are none: they would be divided by
    one another."""
    size = np.abs(batch.reward) + _by_sequence(batch, np.abs(batch.token_reward))
    found: Floats64 = np.where(np.abs(left) <= 1e-12 * size, 0.0, left)
    return found


def _compared(batch: TokenBatch, *, normalise: bool) -> Floats64:
    """[R]: token rewards less the mean of the group's; with ``normalise`` divided by their standard
    deviation."""
    group = batch.group_of[_sequence_of(batch)]
    groups = len(batch.sequences)
    count = np.bincount(group, minlength=groups)
    mean = np.bincount(group, batch.token_reward, groups) / np.maximum(count, 1)
    centred: Floats64 = batch.token_reward - mean[group]
    if not normalise:
        return centred
    variance = np.bincount(group, centred**2, groups) / np.maximum(count - 1, 1)
    found: Floats64 = centred / (np.sqrt(variance) + EPSILON)[group]
    return found


def _sequence_of(batch: TokenBatch) -> NDArray[np.int64]:
    """[R]: the sequence of each rewarded token."""
    ends = np.cumsum(batch.length)
    return np.searchsorted(ends, batch.rewarded, side="right")


def _by_sequence(batch: TokenBatch, values: Floats64) -> Floats64:
    """[R] -> [S]: sums."""
    found = np.zeros(len(batch.length))
    np.add.at(found, _sequence_of(batch), values)
    return found


def _to_end(batch: TokenBatch, values: Floats64) -> Floats64:
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
