"""Supervised objectives: fine-tuning on recorded tokens, and on-policy distillation from a teacher.

SFT: the loss of a step is the weighted sum of -log p over the tokens of the assistant. With
train.loss.aggregation = token_mean it is their mean over the whole step, as in TRL's SFTTrainer;
with sequence_mean the mean of the completions' means.

Distillation: the policy's own samples are pulled towards the distribution of a larger teacher. The
gradient of the reverse KL, KL(policy || teacher) = E[log policy - log teacher] over samples of the
policy, is E[(log policy - log teacher) grad log policy]: a policy gradient whose advantage of each
sampled token is log teacher - log policy. Sources: GKD, Agarwal et al., arXiv 2306.13649, with the
student's samples and the reverse KL; MiniLLM, Gu et al., arXiv 2306.08543; the estimator by the
sampled token alone: Lu and Thinking Machines Lab, "On-Policy Distillation", 2025.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.sections.objective_options import DistillOptions
from policy_worker.objectives.batch import StepTotals, TokenBatch, scored_by
from policy_worker.objectives.columns import TokenColumns, TokenScores
from policy_worker.objectives.grpo import grpo_loss, ratio
from policy_worker.objectives.objective import Loss, Objective


class Sft(Objective):
    """``train.algorithm = "sft"``."""

    def advantages(self, batch: TokenBatch, totals: StepTotals) -> NDArray[np.float64]:
        """[S], all 1: every recorded token counts the same."""
        return np.ones(len(batch.length))

    def loss(self, scores: TokenScores, tokens: TokenColumns[Tensor]) -> Loss:
        """Measured, per token: nll, the negative log-prob, in nats."""
        nll = -scores.logprobs
        return Loss((nll * tokens.weight).sum(), {"nll": nll.detach()})


class Distill(Objective):
    """``train.algorithm = "distill"``. Clipping and importance weights are GRPO's."""

    Options = DistillOptions
    options: DistillOptions

    def advantages(self, batch: TokenBatch, totals: StepTotals) -> NDArray[np.float64]:
        """[S], zeros: the advantage of a token needs the policy's log-prob of it, which ``loss``
        has. Raises BadGroup if the groups have no log-probs of the teacher."""
        scored_by(batch, self.options.teacher)
        return np.zeros(len(batch.length))

    def loss(self, scores: TokenScores, tokens: TokenColumns[Tensor]) -> Loss:
        """Measured, per token: teacher_kl, the estimate of the reverse KL in nats; it is weighted
        by policy / behaviour, because the tokens are samples of the behaviour policy."""
        gap = tokens.scored[self.options.teacher] - scores.before
        advantage = gap.clamp(-self.options.most_advantage, self.options.most_advantage)
        found = grpo_loss(
            scores.logprobs,
            replace(tokens, advantage=advantage),
            self.config.train.loss,
            before=scores.before,
        )
        importance = ratio(scores.before, tokens.behaviour, self.config.train.loss.tis_cap)
        return Loss(found.total, {**found.measured, "teacher_kl": -gap * importance})
