"""Reward model: a scalar score of a completion, trained on pairs.

Sources: Bradley and Terry, Biometrika 39, 1952; margin: Llama 2, Touvron et al., arXiv 2307.09288,
equation 2; centring: Eisenstein et al., arXiv 2312.09244.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from paceline.config.sections.preference_objectives import RewardModelOptions
from policy_worker.objectives.columns import TokenColumns
from policy_worker.objectives.objective import Loss
from policy_worker.objectives.part import Part
from policy_worker.objectives.preferences.pairs import PairObjective, pairs_of, preference_means
from policy_worker.rows.logprobs import TokenScores

PART = "reward"


class RewardModel(PairObjective):
    """``train.algorithm = "reward_model"``. It trains no policy: the model has a scalar head in
    place of the vocabulary's."""

    Options = RewardModelOptions
    options: RewardModelOptions

    @property
    def trains(self) -> tuple[Part, ...]:
        return (Part(PART, head="scalar"),)

    def loss(self, scores: TokenScores, tokens: TokenColumns[Tensor]) -> Loss:
        pairs = pairs_of(tokens)
        score = scores_of_sequences(scores.values[PART], tokens)
        chosen, rejected = score[pairs.winner], score[pairs.loser]
        margin = pairs.margin if self.options.margin else 0.0
        each = bradley_terry(chosen, rejected, margin, self.options.center_coef)
        with torch.no_grad():
            means = preference_means(chosen, rejected)
        return Loss((each * pairs.pair_weight).sum(), means=means)


def scores_of_sequences(values: Tensor, tokens: TokenColumns[Tensor]) -> Tensor:
    """values: float32 [C] of the completion tokens -> [S], those of each sequence's last token."""
    length = torch.bincount(tokens.sequence_of, minlength=tokens.sequences)
    return values[length.cumsum(0) - 1]


def bradley_terry(
    chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0, center_coef: float = 0.0
) -> Tensor:
    """chosen, rejected: scores [P] -> [P]: -log sigmoid(chosen - rejected - margin) + center_coef
    (chosen + rejected)^2."""
    return -logsigmoid(chosen - rejected - margin) + center_coef * (chosen + rejected).square()
