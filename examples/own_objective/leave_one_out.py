"""An objective of one's own: REINFORCE with a leave-one-out baseline and truncated importance
weights.

    paceline up RUN.toml --set train.algorithm=examples.own_objective.leave_one_out:LeaveOneOut

Source: RLOO, Ahmadian et al., arXiv 2402.14740. The weight makes up for the age of the samples.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.fields import Section
from policy_worker.objectives.batch import StepTotals, TokenBatch
from policy_worker.objectives.columns import TokenColumns, TokenScores
from policy_worker.objectives.objective import Loss, Objective


class LeaveOneOut(Objective):
    class Options(Section):
        weight_cap: float = 2.0
        """Largest importance weight of a token."""

    options: Options

    def advantages(self, batch: TokenBatch, totals: StepTotals) -> NDArray[np.float64]:
        """Reward minus the mean of the group's other samples."""
        reward, samples = batch.reward[batch.firsts], batch.samples
        group = np.repeat(np.arange(len(samples)), samples)
        others = np.maximum(samples - 1, 1)[group]
        total = np.bincount(group, reward)[group]
        of_sample: NDArray[np.float64] = reward - (total - reward) / others
        return of_sample[batch.sample_of]

    def loss(self, scores: TokenScores, tokens: TokenColumns[Tensor]) -> Loss:
        log_weight = (scores.before - tokens.behaviour).clamp(-20.0, 20.0)
        weight = log_weight.exp().clamp(max=self.options.weight_cap)
        summands = -weight * scores.logprobs * tokens.advantage * tokens.weight
        return Loss(summands.sum(), {"importance_weight": weight})
