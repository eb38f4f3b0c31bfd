"""Masks by importance ratio: tokens on which trainer and engine disagree too much to learn from.

Sources: by token, IcePop, Ling team, arXiv 2510.18855; by sequence, geometric mean of token ratios as
in GSPO, Zheng et al., arXiv 2507.18071.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.config.schema import TrainConfig
from policy_worker.objectives.columns import TokenColumns
from policy_worker.objectives.proximal_policy import ratio


def ratio_mask(
    trainer: Tensor, columns: TokenColumns[Tensor], config: TrainConfig
) -> Tensor | None:
    """bool [C], False for masked tokens; None if no mask is configured.

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
        zeros = torch.zeros(columns.sequences, dtype=trainer.dtype, device=trainer.device)
        total = zeros.index_add(
            0, columns.sequence_of, (trainer - columns.behaviour) * columns.trained
        )
        count = zeros.index_add(0, columns.sequence_of, columns.trained).clamp(min=1.0)
        mean = (total / count).exp()
        kept = ((mean >= low) & (mean <= high))[columns.sequence_of]
        keep = kept if keep is None else keep & kept
    return keep
