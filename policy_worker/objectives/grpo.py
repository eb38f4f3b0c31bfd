"""The clipped policy-gradient loss of GRPO and its relatives.

Sources: PPO, Schulman et al., arXiv 1707.06347; GRPO, Shao et al., arXiv 2402.03300; asymmetric clip
and token mean: DAPO, Yu et al., arXiv 2503.14476.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.config.schema import TrainConfig
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
    kl: Tensor | None
    """[C], to the reference."""


def grpo_loss(logprobs: Tensor, columns: TokenColumns[Tensor], config: TrainConfig) -> Loss:
    """logprobs: float32 [C], of the policy being trained, with graph.

    Each token contributes weight * (w * -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_coef * KL)
    with r = policy / proximal and w the truncated importance weight proximal / behaviour.
    """
    before = logprobs.detach()
    proximal = proximal_policy(before, columns.behaviour, columns.staleness, config)
    r = ratio(logprobs, proximal.logprobs)
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    surrogate = r * columns.advantage
    bounded = r.clamp(low, high) * columns.advantage
    objective = torch.minimum(surrogate, bounded)
    if proximal.weight is not None:
        objective = objective * proximal.weight
    keep = ratio_mask(before, columns, config)
    weight = columns.weight if keep is None else columns.weight * keep
    total = -(objective * weight).sum()
    kl = None
    if columns.reference is not None:
        kl = token_kl(logprobs, columns.reference, config.kl_estimator)
        total = total + config.kl_coef * (kl * columns.weight).sum()
        kl = kl.detach()
    clipped = (bounded < surrogate).detach()
    return Loss(total, ratio(before, columns.behaviour), clipped, kl)


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
