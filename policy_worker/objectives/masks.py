"""Leaves out what the trainer and the engine disagree about too much to learn from."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.config.schema import TrainConfig
from policy_worker.objectives.proximal_policy import ratio


def ratio_mask(
    trainer: Tensor,
    behaviour: Tensor,
    trained: Tensor,
    sequence_of: Tensor,
    sequences: int,
    config: TrainConfig,
) -> Tensor | None:
    """bool [C], False where masked; None where nothing is configured.

    Token: trainer / behaviour outside mask_ratio_token. Sequence: all tokens of one whose geometric
    mean of token ratios, over trained tokens, is outside mask_ratio_sequence. Bounds are allowed.
    What is masked still counts in the normalisation, so masking never makes the rest count more.
    """
    keep: Tensor | None = None
    if config.mask_ratio_token is not None:
        low, high = config.mask_ratio_token
        r = ratio(trainer, behaviour)
        keep = (r >= low) & (r <= high)
    if config.mask_ratio_sequence is not None:
        low, high = config.mask_ratio_sequence
        zeros = torch.zeros(sequences, dtype=trainer.dtype, device=trainer.device)
        total = zeros.index_add(0, sequence_of, (trainer - behaviour) * trained)
        count = zeros.index_add(0, sequence_of, trained).clamp(min=1.0)
        mean = (total / count).exp()
        kept = ((mean >= low) & (mean <= high))[sequence_of]
        keep = kept if keep is None else keep & kept
    return keep
