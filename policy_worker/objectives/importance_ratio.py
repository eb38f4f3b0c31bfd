"""Importance ratios between the three policies of asynchronous training.

They are the behaviour policy that sampled a token, the proximal policy that the update must stay
close to, and the policy being trained. Sources: decoupled PPO, Hilton et al., arXiv 2110.00641;
AReaL, arXiv 2505.24298; A-3PO, arXiv 2512.06547; masks by token, IcePop, Ling team, arXiv
2510.18855; masks by sequence, geometric mean of token ratios as in GSPO, Zheng et al., arXiv
2507.18071.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.config.sections.training import LossConfig
from policy_worker.objectives.columns import TokenColumns

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
    """values [C], mask [C] (1 or 0) -> [C]: at each token, the mean over the masked-in tokens of
    its sequence. Differentiable."""
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
