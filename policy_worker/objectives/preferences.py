"""Preference objectives: DPO and its loss variants, IPO, ORPO, KTO and reward models.

- DPO, also over sampled groups: Rafailov et al., arXiv 2305.18290; online DPO, Guo et al., arXiv
  2402.04792. Variants: IPO, Azar et al., arXiv 2310.12036; hinge (SLiC), Zhao et al., arXiv
  2305.10425; robust DPO, Chowdhury et al., arXiv 2403.00409; EXO, Ji et al., arXiv 2402.00856; NCA,
  Chen et al., arXiv 2402.05369; BCO, Jung et al., arXiv 2404.04656; SPPO, Wu et al., arXiv
  2405.00675; APO, D'Oosterlinck et al., arXiv 2408.06266; DiscoPOP, Lu et al., arXiv 2406.08414.
- ORPO: supervised training on the chosen completion, and an odds ratio against the other. Source:
  Hong et al., arXiv 2403.07691, equations 4 to 7.
- KTO: completions that are each desirable or not, without pairs. Source: Ethayarajh et al., arXiv
  2402.01306, equation 7. The reference point is a constant: the paper and TRL estimate it over the
  batch, which would couple groups. With 0 it is the unpaired APO-zero of arXiv 2408.06266.
- Reward model: a scalar score of a completion, trained on pairs. Sources: Bradley and Terry,
  Biometrika 39, 1952; margin: Llama 2, Touvron et al., arXiv 2307.09288, equation 2; centring:
  Eisenstein et al., arXiv 2312.09244.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import logsigmoid

from paceline.config.sections.objective_options import (
    DpoOptions,
    IpoOptions,
    KtoOptions,
    OrpoOptions,
    PairOptions,
    RewardModelOptions,
)
from policy_worker.objectives.batch import StepTotals, TokenBatch
from policy_worker.objectives.columns import TokenColumns, TokenScores, sequence_weights
from policy_worker.objectives.grpo import LOG_RATIO_LIMIT
from policy_worker.objectives.objective import Loss, Mean, Objective, Part, reference_of
from policy_worker.objectives.pairs import (
    PairObjective,
    PairScores,
    PolicyPairs,
    pairs_of,
    preference_means,
    sums_by_sequence,
)


class Dpo(PolicyPairs):
    """``train.algorithm = "dpo"``, and "online_dpo" over pairs of a sampled group. Rewards are beta
    times the log-ratio to a frozen reference."""

    Options: type[PairOptions] = DpoOptions
    options: DpoOptions | IpoOptions

    @property
    def frozen(self) -> tuple[Part, ...]:
        return (reference_of(self.config),)

    def pair_loss(self, pairs: PairScores) -> Tensor:
        assert isinstance(self.options, DpoOptions)
        return dpo_loss(pairs, self.options) - self.options.sft_coef * pairs.chosen_mean

    def implicit_rewards(self, pairs: PairScores) -> tuple[Tensor, Tensor]:
        beta = self.options.beta
        return beta * pairs.chosen_shift, beta * pairs.rejected_shift

    def measure_pairs(self, pairs: PairScores) -> Mapping[str, Mean]:
        shift = {"chosen_logprob_shift": Mean(pairs.chosen_shift)}
        return {**super().measure_pairs(pairs), **shift}


class Ipo(Dpo):
    """``train.algorithm = "ipo"``."""

    Options = IpoOptions
    options: IpoOptions

    def pair_loss(self, pairs: PairScores) -> Tensor:
        gap = pairs.mean_gap if self.options.length_average else pairs.gap
        return ipo_loss(gap, self.options.beta) - self.options.sft_coef * pairs.chosen_mean


def ipo_loss(gap: Tensor, beta: float) -> Tensor:
    """(gap - 1 / (2 beta))^2: equation 17 of IPO, whose tau is beta."""
    return (gap - 1 / (2 * beta)).square()


def dpo_loss(pairs: PairScores, options: DpoOptions) -> Tensor:
    """[P]: the loss of each pair that ``objective.loss`` names."""
    beta, flipped = options.beta, options.label_smoothing
    chosen, rejected = beta * pairs.chosen_shift, beta * pairs.rejected_shift
    h = beta * pairs.gap
    match options.loss:
        case "sigmoid":  # DPO, equation 7; with label_smoothing conservative, Mitchell, 2023
            return -(1 - flipped) * logsigmoid(h) - flipped * logsigmoid(-h)
        case "sigmoid_norm":  # length-normalised DPO
            return -logsigmoid(beta * pairs.mean_gap)
        case "hinge":
            return torch.relu(1 - h)
        case "ipo":
            return ipo_loss(pairs.gap, beta)
        case "ipo_norm":
            return ipo_loss(pairs.mean_gap, beta)
        case "robust":  # equation 12: unbiased if label_smoothing of the pairs are flipped
            unlikely = -(1 - flipped) * logsigmoid(h) + flipped * logsigmoid(-h)
            return unlikely / (1 - 2 * flipped)
        case "exo_pair":  # EXO, equation 16: KL from a preference that is label_smoothing unsure
            better, worse = logsigmoid(h), logsigmoid(-h)
            unsure = better.exp() * (better - math.log1p(-flipped))
            return unsure + worse.exp() * (worse - math.log(flipped))
        case "nca_pair":
            return -logsigmoid(chosen) - 0.5 * (logsigmoid(-chosen) + logsigmoid(-rejected))
        case "bco_pair":  # BCO without its running mean of rewards, which would be a state
            return -logsigmoid(chosen) - logsigmoid(-rejected)
        case "sppo_hard":  # SPPO, equation 4.7: the chosen completion wins with probability 1
            half = 0.5 / beta
            return (pairs.chosen_shift - half).square() + (pairs.rejected_shift + half).square()
        case "apo_zero":  # APO, equation 7: raises the chosen completion, lowers the rejected one
            return torch.sigmoid(-chosen) + torch.sigmoid(rejected)
        case "apo_down":  # APO, equation 8: lowers both, the rejected one more
            return torch.sigmoid(chosen) + torch.sigmoid(-h)
        case "discopop":  # equation 5
            share = torch.sigmoid(h / options.discopop_tau)
            exponential = (-h).clamp(max=LOG_RATIO_LIMIT).exp()
            return -logsigmoid(h) * (1 - share) + exponential * share


ALMOST_CERTAIN = -1e-6
"""Mean log-probs count at most this: the odds of a probability of 1 are infinite."""


class Orpo(PolicyPairs):
    """``train.algorithm = "orpo"``. It needs no reference."""

    Options = OrpoOptions
    options: OrpoOptions

    def pair_loss(self, pairs: PairScores) -> Tensor:
        chosen, rejected = pairs.chosen_mean, pairs.rejected_mean
        return -chosen - self.options.beta * logsigmoid(log_odds(chosen) - log_odds(rejected))

    def implicit_rewards(self, pairs: PairScores) -> tuple[Tensor, Tensor]:
        beta = self.options.beta
        return beta * pairs.chosen_mean, beta * pairs.rejected_mean


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
    """``train.algorithm = "reward_model"``: a scalar head is trained, and no policy."""

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
        return Loss((each * pairs.weight).sum(), means=means)


def bradley_terry(
    chosen: Tensor, rejected: Tensor, margin: Tensor | float, center_coef: float
) -> Tensor:
    """chosen, rejected: scores [P] -> [P]: -log sigmoid(chosen - rejected - margin) + center_coef
    (chosen + rejected)^2."""
    return -logsigmoid(chosen - rejected - margin) + center_coef * (chosen + rejected).square()
