"""Tokens whose log-prob and advantage vary together most: they are the ones that lower the entropy.

The source compares a token with the batch. A step's gradient has to be a sum over groups, so a
token is compared with the trained tokens of its group here, and the log-probs are those of the
policy that sampled, which are known before the forward pass. Source: Clip-Cov and KL-Cov, Cui et
al., arXiv 2505.22617.
"""

from __future__ import annotations

import zlib

import numpy as np

from paceline.config.sections.training import LossConfig
from policy_worker.objectives.batch import Floats, TokenBatch


def chosen_tokens(
    batch: TokenBatch, advantage: Floats, trained: Floats, config: LossConfig
) -> Floats:
    """advantage [C], trained [C] (1 or 0) -> float32 [C]: 1 for tokens that
    ``train.loss.covariance`` chooses.

    clip: of the tokens whose covariance is in covariance_range, at random. kl: those with the
    largest, if it is above 0. In both at most covariance_share of the group's trained tokens; a
    fraction is rounded up or down at random, so that the share is right over many groups. What is
    random depends on the group's tokens alone: every replica draws the same.
    """
    chosen = np.zeros(len(trained), dtype=np.float32)
    per_group = np.bincount(batch.group_of, batch.length, len(batch.sequences)).astype(np.int64)
    for end, length in zip(np.cumsum(per_group), per_group, strict=True):
        group = slice(end - length, end)
        at = np.flatnonzero(trained[group])
        if not len(at):
            continue
        rng = np.random.default_rng(zlib.crc32(batch.tokens[group].tobytes()))
        logprobs, gains = batch.behaviour[group][at], advantage[group][at]
        # Its mean is the covariance of the two.
        covariance = (logprobs - logprobs.mean(dtype=np.float64)) * (
            gains - gains.mean(dtype=np.float64)
        )
        count = int(config.covariance_share * len(at) + rng.random())
        if config.covariance == "clip":
            low, high = config.covariance_range
            within = np.flatnonzero((covariance >= low) & (covariance <= high))
            picked = rng.permutation(within)[:count]
        else:
            # Of equal ones any: in the order of the tokens it would always be the first.
            order = rng.permutation(len(covariance))
            largest = order[np.argsort(-covariance[order], kind="stable")][:count]
            picked = largest[covariance[largest] > 0]
        chosen[group.start + at[picked]] = 1.0
    return chosen
