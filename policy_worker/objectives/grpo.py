"""The clipped policy-gradient loss of GRPO and its relatives.

Sources: PPO, Schulman et al., arXiv 1707.06347; GRPO, Shao et al., arXiv 2402.03300; asymmetric
clip and token mean: DAPO, Yu et al., arXiv 2503.14476; dual clip: Ye et al., arXiv 1912.09729;
importance weight of the KL: DeepSeek-V3.2, arXiv 2512.02556; ratio as a constant weight: CISPO,
MiniMax-M1, arXiv 2506.13585. paceline/config/objectives.py has the source of each name of the
family.

Importance ratios compare three policies: the behaviour policy that sampled a token, the proximal
policy that the update must stay close to, and the policy being trained. Sources: decoupled PPO,
Hilton et al., arXiv 2110.00641; AReaL, arXiv 2505.24298; A-3PO, arXiv 2512.06547; masks by token,
IcePop, Ling team, arXiv 2510.18855; masks by sequence, geometric mean of token ratios as in GSPO,
Zheng et al., arXiv 2507.18071.
"""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.sections.training import LossConfig
from policy_worker.objectives.advantages import token_advantages
from policy_worker.objectives.batch import StepTotals, TokenBatch
from policy_worker.objectives.columns import TokenColumns, TokenScores
from policy_worker.objectives.objective import Loss, Objective


class Grpo(Objective):
    """``train.algorithm = "grpo"`` and its family, with the settings of ``[train.loss]``."""

    @property
    def entropy_gradient(self) -> bool:
        return self.config.train.loss.entropy_coef > 0

    def advantages(self, batch: TokenBatch, totals: StepTotals) -> NDArray[np.float64]:
        return token_advantages(batch, totals, self.config.train.loss)

    def columns(self, batch: TokenBatch, totals: StepTotals) -> TokenColumns[np.ndarray]:
        columns = super().columns(batch, totals)
        settings = self.config.train.loss
        if settings.overlong_filter:
            # They still count in the totals: filtering gives the others no more weight.
            whole = ~np.repeat(batch.truncated, batch.length)
            columns = replace(columns, weight=columns.weight * whole.astype(np.float32))
        return columns

    def contributing(
        self, batch: TokenBatch, columns: TokenColumns[np.ndarray]
    ) -> NDArray[np.bool_]:
        keep = super().contributing(batch, columns)
        settings = self.config.train.loss
        terms = settings.kl_coef or settings.entropy_coef or settings.router_aux_loss_coef
        if settings.overlong_filter:
            keep &= ~batch.truncated
        if settings.skip_zero_advantage and not terms:
            starts = np.cumsum(batch.length) - batch.length
            keep &= np.logical_or.reduceat(columns.advantage != 0, starts)
        return keep

    def loss(self, scores: TokenScores, tokens: TokenColumns[Tensor]) -> Loss:
        entropy = scores.entropy if self.entropy_gradient else None
        settings = self.config.train.loss
        return grpo_loss(scores.logprobs, tokens, settings, before=scores.before, entropy=entropy)


def grpo_loss(
    logprobs: Tensor,
    columns: TokenColumns[Tensor],
    config: LossConfig,
    *,
    before: Tensor | None = None,
    entropy: Tensor | None = None,
) -> Loss:
    """logprobs: float32 [C], of the policy being trained, with graph; ``before``: of the policy
    before the step, a constant (default: the same numbers); ``entropy``: float32 [C], with graph,
    if it has a bonus.

    Each token contributes weight * (w * -J + kl_coef * v * KL - entropy_coef * entropy), with J by
    ``surrogate``:

    - clip: min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and at least dual_clip * A if A < 0;
    - weight: clip(r, 1 - clip_low, 1 + clip_high) A log-prob, with the clipped ratio as a constant.

    r is policy / proximal, with ``importance_level`` sequence its geometric mean over the trained
    tokens of the sequence; w the truncated importance weight proximal / behaviour, v the one of the
    policy before the step / behaviour. w and v are constants. With ``kl_in`` reward there is no KL
    term, and A is lowered by kl_coef times the sum of log(before / reference) from the token to the
    end of its sequence.

    Measured, per token: clip_fraction (1 if the clip took its gradient away, or with weight its
    ratio was clipped), dual_clip_fraction (1 if the dual clip did), and with a reference kl, its
    importance weight included.
    """
    before = logprobs.detach() if before is None else before
    proximal, truncated = proximal_policy(before, columns.behaviour, columns.staleness, config)
    constant = config.surrogate == "weight"
    r = _ratio(before if constant else logprobs, proximal, columns, config)
    advantage = _advantage(before, columns, config)
    if constant:
        bounded = r.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
        objective, measured = bounded * advantage * logprobs, {"clip_fraction": bounded != r}
    else:
        objective, measured = _clipped(r, advantage, config)
    if truncated is not None:
        objective = objective * truncated
    keep = ratio_mask(before, columns, config)
    weight = columns.weight if keep is None else columns.weight * keep
    total = -(objective * weight).sum()
    if entropy is not None:
        total = total - config.entropy_coef * (entropy * columns.weight).sum()
    if columns.reference is not None:
        # The tokens are samples of the behaviour policy, the KL is an expectation over the policy.
        importance = ratio(before, columns.behaviour, config.tis_cap)
        kl = importance * token_kl(logprobs, columns.reference, config.kl_estimator)
        if config.kl_in == "loss":
            total = total + config.kl_coef * (kl * columns.weight).sum()
        measured["kl"] = kl.detach()
    return Loss(total, measured)


def _ratio(
    logprobs: Tensor, proximal: Tensor, columns: TokenColumns[Tensor], config: LossConfig
) -> Tensor:
    if config.importance_level == "token":
        return ratio(logprobs, proximal)
    # GSPO, Zheng et al., arXiv 2507.18071, equation 7.
    mean = sequence_mean(
        logprobs - proximal, columns.trained, columns.sequence_of, columns.sequences
    )
    return mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _advantage(before: Tensor, columns: TokenColumns[Tensor], config: LossConfig) -> Tensor:
    if columns.reference is None or config.kl_in == "loss":
        return columns.advantage
    # REINFORCE++, Hu et al., arXiv 2501.03262: the KL is a cost of each token, and is summed to the
    # end.
    cost = (before - columns.reference) * columns.trained
    to_end = sum_to_end(cost, columns.sequence_of, columns.sequences)
    return columns.advantage - config.kl_coef * to_end


def _clipped(r: Tensor, advantage: Tensor, config: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    surrogate = r * advantage
    bounded = r.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * advantage
    objective = torch.minimum(surrogate, bounded)
    dual_clipped = torch.zeros_like(surrogate, dtype=torch.bool)
    if config.dual_clip is not None:
        # With A < 0 the clip above bounds r from below only: one token that the engine found
        # unlikely would be the whole step.
        lowest = config.dual_clip * advantage
        dual_clipped = (advantage < 0) & (surrogate < lowest)
        objective = torch.where(dual_clipped, lowest, objective)
    clipped = (bounded < surrogate).detach()
    return objective, {"clip_fraction": clipped, "dual_clip_fraction": dual_clipped}


def token_kl(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Per token, of log-probs [C] of the sampled tokens; differentiable in ``logprobs``. With r =
    reference / policy: k1 = -log r (unbiased), k2 = (log r)^2 / 2 (its gradient is that of the KL),
    k3 = r - 1 - log r (unbiased, never negative). Source: J. Schulman, "Approximating KL
    divergence", http://joschu.net/blog/kl-approx.html"""
    log_r = reference - logprobs
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return 0.5 * log_r.square()
    return torch.expm1(log_r.clamp(max=LOG_RATIO_LIMIT)) - log_r


def sum_to_end(values: Tensor, sequence_of: Tensor, sequences: int) -> Tensor:
    """values [C] -> [C]: at each token, the sum from it to the end of its sequence."""
    # float64: a difference of two sums over the whole row.
    wide = values.double()
    total = wide.new_zeros(sequences).index_add(0, sequence_of, wide)
    ended = total.cumsum(0)[sequence_of]
    result: Tensor = ended - wide.cumsum(0) + wide
    return result.to(values.dtype)


LOG_RATIO_LIMIT = 20.0
"""Log-ratios are held within +-20 before exp: e^20 is far outside any clip range, and finite."""


def proximal_policy(
    trainer: Tensor, behaviour: Tensor, staleness: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [C] of the proximal policy, and its importance weight proximal / behaviour [C],
    truncated; None: all 1. Both are constants.

    trainer: log-probs [C] of the policy before the step, detached; staleness float [C], in
    steps.

    behaviour: the policy that sampled (PPO). trainer: decoupled PPO; a step makes one update, so
    the trainer's log-probs before the step are those of the same forward. interpolated: log-linear
    mixture (A-3PO); the behaviour policy counts 1 / d at a staleness of d steps, and nothing at d =
    0.
    """
    if config.proximal == "behaviour":
        return behaviour, None
    logprobs = trainer
    if config.proximal == "interpolated":
        share = torch.where(staleness > 0, 1.0 / staleness.clamp(min=1.0), 0.0)
        logprobs = share * behaviour + (1.0 - share) * trainer
    if config.tis_cap is None:
        return logprobs, None
    return logprobs, ratio(logprobs, behaviour, config.tis_cap)


def ratio(numerator: Tensor, denominator: Tensor, cap: float | None = None) -> Tensor:
    """exp(numerator - denominator) of log-probs, kept finite, and at most ``cap``."""
    found = (numerator - denominator).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return found if cap is None else found.clamp(max=cap)


def sequence_mean(values: Tensor, mask: Tensor, sequence_of: Tensor, sequences: int) -> Tensor:
    """values, mask [C] -> [C]: at each token, the mean over its sequence's masked-in tokens."""
    zeros = values.new_zeros(sequences)
    total = zeros.index_add(0, sequence_of, values * mask)
    count = zeros.index_add(0, sequence_of, mask).clamp(min=1.0)
    return (total / count)[sequence_of]


def ratio_mask(trainer: Tensor, columns: TokenColumns[Tensor], config: LossConfig) -> Tensor | None:
    """bool [C], False for tokens on which ``trainer`` (log-probs [C] before the step) and engine
    disagree too much to learn from; None if no mask is configured.

    Token: trainer / behaviour outside mask_ratio_token. Sequence: all tokens of one whose geometric
    mean of token ratios, over trained tokens, is outside mask_ratio_sequence. Bounds are allowed.
    Masked tokens still count in the normalisation, so masking never makes the others count more.
    """
    keep: Tensor | None = None
    if config.mask_ratio_token is not None:
        low, high = config.mask_ratio_token
        r = ratio(trainer, columns.behaviour)
        keep = (r >= low) & (r <= high)
    if config.mask_ratio_sequence is not None:
        low, high = config.mask_ratio_sequence
        gap = trainer - columns.behaviour
        places = columns.trained, columns.sequence_of, columns.sequences
        mean = sequence_mean(gap, *places).exp()
        inside = (mean >= low) & (mean <= high)
        keep = inside if keep is None else keep & inside
    return keep
