"""Direct preference optimisation, its loss variants, IPO, and the same over sampled groups.

Sources: DPO, Rafailov et al., arXiv 2305.18290; IPO, Azar et al., arXiv 2310.12036; hinge (SLiC),
Zhao et al., arXiv 2305.10425; robust DPO, Chowdhury et al., arXiv 2403.00409; EXO, Ji et al., arXiv
2402.00856; NCA, Chen et al., arXiv 2402.05369; BCO, Jung et al., arXiv 2404.04656; SPPO, Wu et al.,
arXiv 2405.00675; APO, D'Oosterlinck et al., arXiv 2408.06266; DiscoPOP, Lu et al., arXiv
2406.08414; online DPO, Guo et al., arXiv 2402.04792.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from paceline.config.sections.objective_options import DpoOptions, IpoOptions
from policy_worker.objectives.importance_ratio import LOG_RATIO_LIMIT
from policy_worker.objectives.objective import Mean, Part, reference_of
from policy_worker.objectives.pairs import PairScores, PolicyPairs


class _AgainstReference(PolicyPairs):
    """Pairs whose rewards are beta times the log-ratio to a frozen reference."""

    @property
    def frozen(self) -> tuple[Part, ...]:
        return (reference_of(self.config),)

    options: DpoOptions | IpoOptions

    def implicit_rewards(self, pairs: PairScores) -> tuple[Tensor, Tensor]:
        beta = self.options.beta
        return beta * pairs.chosen_shift, beta * pairs.rejected_shift

    def measure_pairs(self, pairs: PairScores) -> Mapping[str, Mean]:
        shift = {"chosen_logprob_shift": Mean(pairs.chosen_shift)}
        return {**super().measure_pairs(pairs), **shift}


class Dpo(_AgainstReference):
    """``train.algorithm = "dpo"``, and "online_dpo" over pairs of a sampled group."""

    Options = DpoOptions
    options: DpoOptions

    def pair_loss(self, pairs: PairScores) -> Tensor:
        return dpo_loss(pairs, self.options) + self.options.sft_coef * chosen_nll(pairs)


class Ipo(_AgainstReference):
    """``train.algorithm = "ipo"``."""

    Options = IpoOptions
    options: IpoOptions

    def pair_loss(self, pairs: PairScores) -> Tensor:
        gap = mean_gap(pairs) if self.options.length_average else shift_gap(pairs)
        return ipo_loss(gap, self.options.beta) + self.options.sft_coef * chosen_nll(pairs)


def chosen_nll(pairs: PairScores) -> Tensor:
    """[P]: mean negative log-prob per token of the chosen completion."""
    return -pairs.chosen / pairs.chosen_tokens


def shift_gap(pairs: PairScores) -> Tensor:
    """[P]: log-ratio policy / reference of the chosen completion less that of the rejected one."""
    return pairs.chosen_shift - pairs.rejected_shift


def mean_gap(pairs: PairScores) -> Tensor:
    """shift_gap of log-ratios that are means over the completion's tokens."""
    return pairs.chosen_shift / pairs.chosen_tokens - pairs.rejected_shift / pairs.rejected_tokens


def ipo_loss(gap: Tensor, beta: float) -> Tensor:
    """(gap - 1 / (2 beta))^2: equation 17 of IPO, whose tau is beta."""
    return (gap - 1 / (2 * beta)).square()


def dpo_loss(pairs: PairScores, options: DpoOptions) -> Tensor:
    """[P]: the loss of each pair that ``objective.loss`` names."""
    beta, flipped = options.beta, options.label_smoothing
    chosen, rejected = beta * pairs.chosen_shift, beta * pairs.rejected_shift
    h = beta * shift_gap(pairs)
    match options.loss:
        case (
            "sigmoid"
        ):  # DPO, equation 7; with label_smoothing the conservative one, Mitchell, 2023
            return -(1 - flipped) * logsigmoid(h) - flipped * logsigmoid(-h)
        case "sigmoid_norm":  # length-normalised DPO
            return -logsigmoid(beta * mean_gap(pairs))
        case "hinge":
            return torch.relu(1 - h)
        case "ipo":
            return ipo_loss(shift_gap(pairs), beta)
        case "ipo_norm":
            return ipo_loss(mean_gap(pairs), beta)
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
