"""The clipped policy-gradient loss of GRPO and its relatives.

Sources: PPO, Schulman et al., arXiv 1707.06347; GRPO, Shao et al., arXiv 2402.03300; asymmetric clip
and token mean: DAPO, Yu et al., arXiv 2503.14476; dual clip: Ye et al., arXiv 1912.09729; importance
weight of the KL: DeepSeek-V3.2, arXiv 2512.02556.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.config.training import TrainConfig
from policy_worker.objectives.columns import TokenColumns
from policy_worker.objectives.importance_ratio import (
    LOG_RATIO_LIMIT,
    proximal_policy,
    ratio,
    ratio_mask,
)


@dataclass(frozen=True, slots=True)
class Loss:
    total: Tensor
    """Scalar with graph: this micro-batch's summand of the step's loss."""
    ratio: Tensor
    """[C], trainer / behaviour before the step; a constant, as what follows."""
    clipped: Tensor
    """bool [C]: the clip took the token's gradient away."""
    dual_clipped: Tensor
    """bool [C]: the dual clip did."""
    kl: Tensor | None
    """[C], to the reference, importance weight included."""


def grpo_loss(logprobs: Tensor, columns: TokenColumns[Tensor], config: TrainConfig) -> Loss:
    """logprobs: float32 [C], of the policy being trained, with graph.

    Each token contributes weight * (w * -J + kl_coef * v * KL) with
    J = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and at least dual_clip * A where A < 0. r is
    policy / proximal, w the truncated importance weight proximal / behaviour, v the one of the policy before
    the step / behaviour. w and v are constants.
    """
    before = logprobs.detach()
    proximal = proximal_policy(before, columns.behaviour, columns.staleness, config)
    r = ratio(logprobs, proximal.logprobs)
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    surrogate = r * columns.advantage
    bounded = r.clamp(low, high) * columns.advantage
    objective = torch.minimum(surrogate, bounded)
    dual_clipped = torch.zeros_like(surrogate, dtype=torch.bool)
    if config.dual_clip is not None:
        # With A < 0 the clip above bounds r from below only: one token that the engine found unlikely
        # would be the whole step.
        lowest = config.dual_clip * columns.advantage
        dual_clipped = (columns.advantage < 0) & (surrogate < lowest)
        objective = torch.where(dual_clipped, lowest, objective)
    if proximal.weight is not None:
        objective = objective * proximal.weight
    keep = ratio_mask(before, columns, config)
    weight = columns.weight if keep is None else columns.weight * keep
    total = -(objective * weight).sum()
    kl = None
    if columns.reference is not None:
        # The tokens are samples of the behaviour policy, the KL is an expectation over the policy.
        importance = ratio(before, columns.behaviour)
        if config.tis_cap is not None:
            importance = importance.clamp(max=config.tis_cap)
        kl = importance * token_kl(logprobs, columns.reference, config.kl_estimator)
        total = total + config.kl_coef * (kl * columns.weight).sum()
        kl = kl.detach()
    clipped = (bounded < surrogate).detach()
    return Loss(total, ratio(before, columns.behaviour), clipped, dual_clipped, kl)


def token_kl(logprobs: Tensor, reference: Tensor, estimator: str) -> Tensor:
    """Per token, of log-probs [C] of the sampled tokens; differentiable in ``logprobs``.

    With r = reference / policy: k1 = -log r (unbiased), k2 = (log r)^2 / 2 (its gradient is that of
    the KL), k3 = r - 1 - log r (unbiased, never negative). Source: J. Schulman, "Approximating KL
    divergence", http://joschu.net/blog/kl-approx.html
    """
    log_r = reference - logprobs
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return 0.5 * log_r.square()
    return torch.expm1(log_r.clamp(max=LOG_RATIO_LIMIT)) - log_r
