"""Preference objectives beside DPO: ORPO, KTO and reward models.

- ORPO: supervised training on the chosen completion, and an odds ratio against the other. Source:
  Hong et al., arXiv 2403.07691, equations 4 to 7.
- KTO: completions that are each desirable or not, without pairs. Source: Ethayarajh et al., arXiv
  2402.01306, equation 7. The reference point is a constant: the paper and TRL estimate it over the
  batch, which would couple groups. With 0 it is the unpaired APO-zero of arXiv 2408.06266.
- Reward model: a scalar score of a completion, trained on pairs. Sources: Bradley and Terry,
  Biometrika 39, 1952; margin: Llama 2, Touvron et al., arXiv 2307.09288, equation 2; centring:
  Eisenstein et al., arXiv 2312.09244.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import logsigmoid

from paceline.config.sections.objective_options import (
    KtoOptions,
    OrpoOptions,
    RewardModelOptions,
)
from policy_worker.objectives.batch import StepTotals, TokenBatch
from policy_worker.objectives.columns import TokenColumns, TokenScores, sequence_weights
from policy_worker.objectives.objective import Loss, Mean, Objective, Part, reference_of
from policy_worker.objectives.pairs import (
    PairObjective,
    PairScores,
    PolicyPairs,
    pairs_of,
    preference_means,
    sums_by_sequence,
)

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


class Kto(Objective):
    """``train.algorithm = "kto"``: the mean over completions."""

    Options = KtoOptions
    options: KtoOptions

    @property
    def frozen(self) -> tuple[Part, ...]:
        return (reference_of(self.config),)

    def advantages(self, batch: TokenBatch, totals: StepTotals) -> NDArray[np.float64]:
        """[S]: the weight of a desirable completion, less that of an undesirable one."""
        desirable = batch.reward > self.options.threshold
        weights = self.options.desirable_weight, -self.options.undesirable_weight
        return np.where(desirable, *weights)

    def columns(self, batch: TokenBatch, totals: StepTotals) -> TokenColumns[np.ndarray]:
        """Weights of a sequence's trained tokens add up to 1 / sequences of the step."""
        tokens = super().columns(batch, totals)
        weight = sequence_weights(tokens.trained, batch.length, totals.sequences)
        return replace(tokens, weight=weight)

    def contributing(
        self, batch: TokenBatch, columns: TokenColumns[np.ndarray]
    ) -> NDArray[np.bool_]:
        starts = np.cumsum(batch.length) - batch.length
        weighted: NDArray[np.bool_] = columns.advantage[starts] != 0
        return super().contributing(batch, columns) & weighted

    def loss(self, scores: TokenScores, tokens: TokenColumns[Tensor]) -> Loss:
        assert tokens.reference is not None  # kto always has one
        shift = sums_by_sequence(scores.logprobs - tokens.reference, tokens)
        signed = sums_by_sequence(tokens.weight * tokens.advantage, tokens)
        each = kto_loss(shift, signed > 0, self.options.beta, self.options.baseline)
        with torch.no_grad():
            reward = self.options.beta * shift
            desirable, undesirable = (signed > 0).float(), (signed < 0).float()
            means = {
                "chosen_reward": Mean(reward, desirable),
                "rejected_reward": Mean(reward, undesirable),
                "chosen_logprob_shift": Mean(shift, desirable),
            }
        return Loss((each * signed.abs()).sum(), means=means)


def kto_loss(shift: Tensor, desirable: Tensor, beta: float, baseline: float) -> Tensor:
    """shift: log-ratios policy / reference [S] of completions, ``desirable`` bool [S] -> [S]: 1 -
    sigmoid(beta (shift - baseline)); for an undesirable one, of the opposite sign."""
    sign = torch.where(desirable, 1.0, -1.0).to(shift.dtype)
    return 1 - torch.sigmoid(sign * beta * (shift - baseline))


PART = "reward"


class RewardModel(PairObjective):
    """``train.algorithm = "reward_model"``. It trains no policy: the model has a scalar head in
    place of the vocabulary's."""

    Options = RewardModelOptions
    options: RewardModelOptions

    @property
    def trains(self) -> tuple[Part, ...]:
        return (Part(PART, head="scalar"),)

    def loss(self, scores: TokenScores, tokens: TokenColumns[Tensor]) -> Loss:
        pairs = pairs_of(tokens)
        length = torch.bincount(tokens.sequence_of, minlength=tokens.sequences)
        score = scores.values[PART][length.cumsum(0) - 1]  # of each sequence's last token
        chosen, rejected = score[pairs.winner], score[pairs.loser]
        margin = pairs.margin if self.options.margin else 0.0
        each = bradley_terry(chosen, rejected, margin, self.options.center_coef)
        with torch.no_grad():
            means = preference_means(chosen, rejected)
        return Loss((each * pairs.pair_weight).sum(), means=means)


def bradley_terry(
    chosen: Tensor, rejected: Tensor, margin: Tensor | float, center_coef: float
) -> Tensor:
    """chosen, rejected: scores [P] -> [P]: -log sigmoid(chosen - rejected - margin) + center_coef
    (chosen + rejected)^2."""
    return -logsigmoid(chosen - rejected - margin) + center_coef * (chosen + rejected).square()
