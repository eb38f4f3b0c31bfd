"""Which policy the ratio is taken against, and the weight that makes up for the rest of the way.

Three policies meet in asynchronous training: the behaviour policy that sampled a token, the proximal
policy that the update must stay close to, and the policy being trained.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.config.schema import TrainConfig

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are held within +-20 before exp: e^20 is far outside any clip range, and finite."""


@dataclass(frozen=True, slots=True)
class Proximal:
    logprobs: Tensor
    """[C], of the proximal policy; a constant."""
    weight: Tensor | None
    """[C], importance weight proximal / behaviour, truncated; a constant. None: all 1."""


def proximal_policy(
    trainer: Tensor, behaviour: Tensor, staleness: Tensor, config: TrainConfig
) -> Proximal:
    """trainer: log-probs [C] of the policy before the step, detached; staleness float [C], in steps.

    behaviour: PPO as it was sampled. trainer: decoupled PPO (Hilton et al., arXiv 2110.00641; AReaL,
    arXiv 2505.24298); as a step makes one update, the trainer's log-probs before the step are those
    of the same forward. interpolated: log-linear mixture, the behaviour policy counting 1 / d for a
    staleness of d steps (A-3PO, arXiv 2512.06547) and nothing for d = 0, where the two agree.
    """
    if config.proximal == "behaviour":
        return Proximal(behaviour, None)
    logprobs = trainer
    if config.proximal == "interpolated":
        share = torch.where(staleness > 0, 1.0 / staleness.clamp(min=1.0), 0.0)
        logprobs = share * behaviour + (1.0 - share) * trainer
    if config.tis_cap is None:
        return Proximal(logprobs, None)
    return Proximal(logprobs, ratio(logprobs, behaviour).clamp(max=config.tis_cap))


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """exp(numerator - denominator) of log-probs, kept finite."""
    return (numerator - denominator).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
