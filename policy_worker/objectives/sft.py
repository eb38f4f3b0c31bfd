"""Supervised fine-tuning: the cross-entropy of recorded tokens.

The loss of a step is the weighted sum of -log p over the tokens of the assistant. With
train.aggregation = token_mean it is their mean over the whole step, as in TRL's SFTTrainer; with
sequence_mean the mean of the rows' means.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from policy_worker.objectives.columns import TokenColumns
from policy_worker.objectives.objective import Loss, Objective
from policy_worker.rows.logprobs import TokenScores
from policy_worker.step.batch import TokenBatch
from policy_worker.step.totals import StepTotals


class Sft(Objective):
    """``train.algorithm = "sft"``."""

    def advantages(self, batch: TokenBatch, totals: StepTotals) -> NDArray[np.float64]:
        """[S], all 1: every recorded token counts the same."""
        return np.ones(len(batch.length))

    def loss(self, scores: TokenScores, tokens: TokenColumns[Tensor]) -> Loss:
        """Measured, per token: nll, the negative log-prob, in nats."""
        nll = -scores.logprobs
        return Loss((nll * tokens.weight).sum(), {"nll": nll.detach()})
