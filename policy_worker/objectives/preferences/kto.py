"""Kahneman-Tversky optimisation: completions that are each desirable or not, without pairs.

Source: KTO, Ethayarajh et al., arXiv 2402.01306, equation 7. The reference point is a constant: the
paper and TRL estimate it over the batch, which would couple groups. With 0 it is the unpaired
APO-zero of arXiv 2408.06266.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.sections.preference_objectives import KtoOptions
from policy_worker.objectives.columns import TokenColumns, trained_by_sequence
from policy_worker.objectives.objective import Loss, Mean, Objective, reference_of
from policy_worker.objectives.part import Part
from policy_worker.objectives.preferences.pairs import sums_by_sequence
from policy_worker.rows.logprobs import TokenScores
from policy_worker.step.batch import TokenBatch
from policy_worker.step.totals import StepTotals


class Kto(Objective):
    """``train.algorithm = "kto"``: the mean over completions."""

    Options = KtoOptions
    options: KtoOptions

    @property
    def frozen(self) -> tuple[Part, ...]:
        return (reference_of(self.config),)

    def advantages(self, batch: TokenBatch, totals: StepTotals) -> NDArray[np.float64]:
        """[S]: the weight of a desirable completion, less that of an undesirable one."""
        desirable = batch.reward > self.options.threshold
        weights = self.options.desirable_weight, -self.options.undesirable_weight
        return np.where(desirable, *weights)

    def columns(self, batch: TokenBatch, totals: StepTotals) -> TokenColumns[np.ndarray]:
        """Weights of a sequence's trained tokens add up to 1 / sequences of the step."""
        tokens = super().columns(batch, totals)
        own = np.maximum(trained_by_sequence(tokens.trained, batch.length), 1.0)
        share = np.repeat(own * max(totals.sequences, 1), batch.length)
        return replace(tokens, weight=(tokens.trained / share).astype(np.float32))

    def contributing(
        self, batch: TokenBatch, columns: TokenColumns[np.ndarray]
    ) -> NDArray[np.bool_]:
        starts = np.cumsum(batch.length) - batch.length
        weighted: NDArray[np.bool_] = columns.advantage[starts] != 0
        return super().contributing(batch, columns) & weighted

    def loss(self, scores: TokenScores, tokens: TokenColumns[Tensor]) -> Loss:
        if tokens.reference is None:
            raise RuntimeError("kto needs the log-probs of a reference")
        shift = sums_by_sequence(scores.logprobs - tokens.reference, tokens)
        signed = sums_by_sequence(tokens.weight * tokens.advantage, tokens)
        each = kto_loss(shift, signed > 0, self.options.beta, self.options.baseline)
        with torch.no_grad():
            reward = self.options.beta * shift
            desirable, undesirable = (signed > 0).float(), (signed < 0).float()
            means = {
                "chosen_reward": Mean(reward, desirable),
                "rejected_reward": Mean(reward, undesirable),
                "chosen_logprob_shift": Mean(shift, desirable),
            }
        return Loss((each * signed.abs()).sum(), means=means)


def kto_loss(shift: Tensor, desirable: Tensor, beta: float, baseline: float) -> Tensor:
    """shift: log-ratios policy / reference [S] of completions, ``desirable`` bool [S] -> [S].

    1 - sigmoid(beta (shift - baseline)); for an undesirable one, of the opposite sign.
    """
    sign = torch.where(desirable, 1.0, -1.0).to(shift.dtype)
    return 1 - torch.sigmoid(sign * beta * (shift - baseline))
