"""Preference pairs: a better and a worse completion of one group, and the base class of objectives
over them.

A recorded pair is a group of two, whose first has the higher reward. A sampled group makes its
pairs by reward.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.schema import Config
from paceline.config.sections.objective_options import PairOptions
from policy_worker.objectives.batch import BadGroup, Floats, Ints, StepTotals, TokenBatch
from policy_worker.objectives.columns import (
    Array,
    PairColumns,
    TokenColumns,
    TokenScores,
    trained_by_sequence,
)
from policy_worker.objectives.objective import Loss, Mean, Objective


@dataclass(frozen=True, slots=True)
class PairScores:
    """Scores of P pairs. float32 [P]; the policy's have a graph."""

    chosen: Tensor
    """Log-prob of the chosen completion: the sum over its trained tokens."""
    rejected: Tensor
    chosen_reference: Tensor
    """The same under the frozen reference; 0 if there is none."""
    rejected_reference: Tensor
    chosen_tokens: Tensor
    """Trained tokens of the completion, at least 1."""
    rejected_tokens: Tensor

    @property
    def chosen_shift(self) -> Tensor:
        """log-ratio policy / reference of the chosen completion."""
        return self.chosen - self.chosen_reference

    @property
    def rejected_shift(self) -> Tensor:
        return self.rejected - self.rejected_reference

    @property
    def gap(self) -> Tensor:
        """log-ratio policy / reference of the chosen completion less that of the rejected one."""
        return self.chosen_shift - self.rejected_shift

    @property
    def mean_gap(self) -> Tensor:
        """``gap`` of log-ratios that are means over the completion's tokens."""
        return self.chosen_shift / self.chosen_tokens - self.rejected_shift / self.rejected_tokens

    @property
    def chosen_mean(self) -> Tensor:
        """Log-prob per token of the chosen completion."""
        return self.chosen / self.chosen_tokens

    @property
    def rejected_mean(self) -> Tensor:
        return self.rejected / self.rejected_tokens


class PairObjective(Objective):
    """A mean over pairs. A derived class defines ``loss``, from the pairs of ``pairs_of``."""

    Options = PairOptions
    options: PairOptions
    whole_groups = True

    def __init__(self, config: Config) -> None:
        """Raises ValueError if samples may have branches."""
        super().__init__(config)
        if config.rollout.environment is not None and config.most_branches > 1:
            raise ValueError(
                "pairs are of samples of one sequence, and those of an environment may have "
                "branches: set rollout.max_branches = 1"
            )

    def advantages(self, batch: TokenBatch, totals: StepTotals) -> NDArray[np.float64]:
        """The rewards themselves: they only say which completion is better."""
        return batch.reward

    def columns(self, batch: TokenBatch, totals: StepTotals) -> TokenColumns[np.ndarray]:
        if len(batch.firsts) < len(batch.length):
            raise BadGroup("pairs are of samples of one sequence, and a sample has branches")
        tokens = super().columns(batch, totals)
        trained = trained_by_sequence(tokens.trained, batch.length) > 0
        every = self.options.pairs == "all"
        chosen, rejected = form_pairs(batch.reward, batch.sequences, trained, every=every)
        weight = pair_weights(batch.sequences, totals.sequences, every=every)
        margin = (batch.reward[chosen] - batch.reward[rejected]).astype(np.float32)
        pairs = PairColumns(chosen, rejected, weight[batch.group_of[chosen]], margin)
        return replace(tokens, pairs=pairs)

    def contributing(
        self, batch: TokenBatch, columns: TokenColumns[np.ndarray]
    ) -> NDArray[np.bool_]:
        paired = np.zeros(len(batch.length), np.bool_)
        pairs = pairs_of(columns)
        paired[pairs.winner] = paired[pairs.loser] = True
        return paired


class PolicyPairs(PairObjective):
    """A mean over pairs of a loss of log-probs, which a derived class defines."""

    def loss(self, scores: TokenScores, tokens: TokenColumns[Tensor]) -> Loss:
        found = scored_pairs(scores.logprobs, tokens)
        total = (self.pair_loss(found) * pairs_of(tokens).weight).sum()
        with torch.no_grad():
            return Loss(total, means=self.measure_pairs(found))

    @abstractmethod
    def pair_loss(self, pairs: PairScores) -> Tensor:
        """[P], of each pair alone."""

    @abstractmethod
    def implicit_rewards(self, pairs: PairScores) -> tuple[Tensor, Tensor]:
        """[P] each: what the loss raises for chosen completions, and lowers for rejected ones."""

    def measure_pairs(self, pairs: PairScores) -> Mapping[str, Mean]:
        """Means over pairs, by name."""
        chosen, rejected = self.implicit_rewards(pairs)
        return {
            **preference_means(chosen, rejected),
            "chosen_logprob": Mean(pairs.chosen),
            "rejected_logprob": Mean(pairs.rejected),
        }


def form_pairs(
    reward: NDArray[np.float64], sequences: Ints, usable: NDArray[np.bool_], *, every: bool
) -> tuple[Ints, Ints]:
    """reward [S], group after group, ``sequences`` [G] in each -> indices of better and worse
    sequences, [P] each.

    The best of a group with its worst; with ``every`` also the second best with the second worst,
    and so on, so that no sequence is in two pairs. Sequences that are not ``usable`` [S] are in
    none; neither are two of equal reward. Of equal rewards the earlier sequence ranks higher.
    """
    group = np.repeat(np.arange(len(sequences)), sequences)
    best_first = np.lexsort((-reward, group))
    best_first = best_first[usable[best_first]]
    count = np.bincount(group[best_first], minlength=len(sequences))
    pairs = count // 2 if every else np.minimum(count // 2, 1)
    start = np.cumsum(count) - count
    rank = np.arange(pairs.sum()) - np.repeat(np.cumsum(pairs) - pairs, pairs)
    better = best_first[np.repeat(start, pairs) + rank]
    worse = best_first[np.repeat(start + count - 1, pairs) - rank]
    differ = reward[better] > reward[worse]
    return better[differ], worse[differ]


def pair_weights(sequences: Ints, total: int, *, every: bool) -> Floats:
    """``sequences`` [G] of each group, ``total`` of the whole step, on all replicas -> float32 [G].

    1 / the pairs that the step could have. So the loss is the mean over the pairs of recorded data.
    For sampled groups it is the mean over all possible pairs, to which completions of equal reward
    add 0: how many differ in reward is not known before the step, and must not depend on the
    replica.
    """
    possible = np.maximum(sequences // 2, 1) if every else 1
    weights: Floats = (sequences / (possible * max(total, 1))).astype(np.float32)
    return weights


def scored_pairs(logprobs: Tensor, tokens: TokenColumns[Tensor]) -> PairScores:
    """logprobs: float32 [C], with graph. Tokens that are not trained count nothing."""
    reference = torch.zeros_like(logprobs) if tokens.reference is None else tokens.reference
    columns = (logprobs, reference, torch.ones_like(logprobs))
    sums = [sums_by_sequence(column, tokens) for column in columns]
    pairs = pairs_of(tokens)
    return PairScores(*(s[place] for s in sums for place in (pairs.winner, pairs.loser)))


def sums_by_sequence(values: Tensor, tokens: TokenColumns[Tensor]) -> Tensor:
    """[C] -> [S]: sums over the trained tokens of each sequence."""
    zeros = torch.zeros(tokens.sequences, dtype=values.dtype, device=values.device)
    return zeros.index_add(0, tokens.sequence_of, values * tokens.trained.to(values.dtype))


def preference_means(chosen: Tensor, rejected: Tensor) -> dict[str, Mean]:
    """chosen, rejected: rewards [P] of pairs, constants. A tie is half right."""
    right = (chosen > rejected).float() + 0.5 * (chosen == rejected).float()
    return {
        "pair_accuracy": Mean(right),
        "reward_margin": Mean(chosen - rejected),
        "chosen_reward": Mean(chosen),
        "rejected_reward": Mean(rejected),
    }


def pairs_of(columns: TokenColumns[Array]) -> PairColumns[Array]:
    """Raises TypeError if an objective made columns without them."""
    if columns.pairs is None:
        raise TypeError("these columns have no pairs: an objective of pairs makes them")
    return columns.pairs
