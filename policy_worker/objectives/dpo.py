"""Direct preference optimisation, its loss variants, IPO, and the same over sampled groups.

Sources: DPO, Rafailov et al., arXiv 2305.18290; IPO, Azar et al., arXiv 2310.12036; hinge (SLiC),
Zhao et al., arXiv 2305.10425; robust DPO, Chowdhury et al., arXiv 2403.00409; EXO, Ji et al., arXiv
2402.00856; NCA, Chen et al., arXiv 2402.05369; BCO, Jung et al., arXiv 2404.04656; SPPO, Wu et al.,
arXiv 2405.00675; APO, D'Oosterlinck et al., arXiv 2408.06266; DiscoPOP, Lu et al., arXiv
2406.08414; online DPO, Guo et al., arXiv 2402.04792.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

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
    """``train.algorithm = "dpo"``."""

    Options = DpoOptions
    options: DpoOptions

    def pair_loss(self, pairs: PairScores) -> Tensor:
        loss = _LOSSES[self.options.loss](pairs, self.options)
        return loss + self.options.sft_coef * chosen_nll(pairs)


class OnlineDpo(Dpo):
    """``train.algorithm = "online_dpo"``: DPO over pairs of a sampled group."""


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


# ---- losses of a pair, [P], by the name of objective.loss


def _sigmoid(pairs: PairScores, options: DpoOptions) -> Tensor:
    """DPO, equation 7; with label_smoothing the conservative one, Mitchell, 2023."""
    h, flipped = options.beta * shift_gap(pairs), options.label_smoothing
    return -(1 - flipped) * logsigmoid(h) - flipped * logsigmoid(-h)


def _sigmoid_norm(pairs: PairScores, options: DpoOptions) -> Tensor:
    """Length-normalised DPO."""
    return -logsigmoid(options.beta * mean_gap(pairs))


def _hinge(pairs: PairScores, options: DpoOptions) -> Tensor:
    return torch.relu(1 - options.beta * shift_gap(pairs))


def _robust(pairs: PairScores, options: DpoOptions) -> Tensor:
    """Robust DPO, equation 12: unbiased if label_smoothing of the pairs are flipped."""
    h, flipped = options.beta * shift_gap(pairs), options.label_smoothing
    unlikely = -(1 - flipped) * logsigmoid(h) + flipped * logsigmoid(-h)
    return unlikely / (1 - 2 * flipped)


def _exo_pair(pairs: PairScores, options: DpoOptions) -> Tensor:
    """EXO, equation 16: KL of the policy's preference from one that is label_smoothing unsure."""
    h, flipped = options.beta * shift_gap(pairs), options.label_smoothing
    better, worse = logsigmoid(h), logsigmoid(-h)
    return better.exp() * (better - math.log1p(-flipped)) + worse.exp() * (
        worse - math.log(flipped)
    )


def _nca_pair(pairs: PairScores, options: DpoOptions) -> Tensor:
    chosen, rejected = options.beta * pairs.chosen_shift, options.beta * pairs.rejected_shift
    return -logsigmoid(chosen) - 0.5 * (logsigmoid(-chosen) + logsigmoid(-rejected))


def _bco_pair(pairs: PairScores, options: DpoOptions) -> Tensor:
    """BCO without its running mean of rewards, which would be a state."""
    return -logsigmoid(options.beta * pairs.chosen_shift) - logsigmoid(
        -options.beta * pairs.rejected_shift
    )


def _sppo_hard(pairs: PairScores, options: DpoOptions) -> Tensor:
    """SPPO, equation 4.7, with a win probability of 1 for the chosen completion."""
    half = 0.5 / options.beta
    return (pairs.chosen_shift - half).square() + (pairs.rejected_shift + half).square()


def _apo_zero(pairs: PairScores, options: DpoOptions) -> Tensor:
    """APO, equation 7: raises the chosen completion, lowers the rejected one."""
    chosen, rejected = options.beta * pairs.chosen_shift, options.beta * pairs.rejected_shift
    return torch.sigmoid(-chosen) + torch.sigmoid(rejected)


def _apo_down(pairs: PairScores, options: DpoOptions) -> Tensor:
    """APO, equation 8: lowers both, the rejected one more."""
    chosen = options.beta * pairs.chosen_shift
    return torch.sigmoid(chosen) + torch.sigmoid(-options.beta * shift_gap(pairs))


def _discopop(pairs: PairScores, options: DpoOptions) -> Tensor:
    """DiscoPOP, equation 5."""
    h = options.beta * shift_gap(pairs)
    share = torch.sigmoid(h / options.discopop_tau)
    exponential = (-h).clamp(max=LOG_RATIO_LIMIT).exp()
    return -logsigmoid(h) * (1 - share) + exponential * share


_LOSSES: dict[str, Callable[[PairScores, DpoOptions], Tensor]] = {
    "sigmoid": _sigmoid,
    "sigmoid_norm": _sigmoid_norm,
    "hinge": _hinge,
    "ipo": lambda pairs, options: ipo_loss(shift_gap(pairs), options.beta),
    "ipo_norm": lambda pairs, options: ipo_loss(mean_gap(pairs), options.beta),
    "robust": _robust,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
}
