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
from policy_worker.objectives.kl import token_kl
from policy_worker.objectives.masks import ratio_mask
from policy_worker.objectives.proximal_policy import proximal_policy, ratio


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
    return Loss(
        total,
        ratio(before, columns.behaviour),
        (bounded < surrogate).detach(),
        kl,
    )
