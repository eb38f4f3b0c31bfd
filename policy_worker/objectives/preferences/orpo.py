"""Odds-ratio preference optimisation: supervised training on the chosen completion, and an odds
ratio against the other.

Source: ORPO, Hong et al., arXiv 2403.07691, equations 4 to 7.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from paceline.config.sections.preference_objectives import OrpoOptions
from policy_worker.objectives.preferences.pairs import PairScores, PolicyPairs

ALMOST_CERTAIN = -1e-6
"""Mean log-probs count at most this: the odds of a probability of 1 are infinite."""


class Orpo(PolicyPairs):
    """``train.algorithm = "orpo"``. It needs no reference."""

    Options = OrpoOptions
    options: OrpoOptions

    def pair_loss(self, pairs: PairScores) -> Tensor:
        chosen, rejected = mean_logprobs(pairs)
        return -chosen - self.options.beta * logsigmoid(log_odds(chosen) - log_odds(rejected))

    def implicit_rewards(self, pairs: PairScores) -> tuple[Tensor, Tensor]:
        chosen, rejected = mean_logprobs(pairs)
        return self.options.beta * chosen, self.options.beta * rejected


def mean_logprobs(pairs: PairScores) -> tuple[Tensor, Tensor]:
    """[P] each: log-prob per token of the chosen and of the rejected completion."""
    return pairs.chosen / pairs.chosen_tokens, pairs.rejected / pairs.rejected_tokens


def log_odds(logprob: Tensor) -> Tensor:
    """log(p / (1 - p)) of log p [P], at most 0."""
    x = logprob.clamp(max=ALMOST_CERTAIN)
    near = x > -0.6931471805599453
    # Each branch is exact in its half. The other gets a harmless number, so that no gradient is
    # NaN.
    low = torch.log1p(-torch.where(near, -1.0, x).exp())
    high = torch.log(-torch.expm1(torch.where(near, x, -0.5)))
    return x - torch.where(near, high, low)
