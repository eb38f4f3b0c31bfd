"""Token columns: the per-token inputs of the loss, by name.

Weights are such that the plain sum over a whole step is the loss: they depend only on the step's
totals and on a sequence's own length, never on the replica or micro-batch of the sequence, so
gradients of parts add up to that of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.schema import Config
from paceline.config.sections.scorers import named_scorer
from paceline.process.compute_device import to_device
from policy_worker.objectives.batch import Floats, Ints, StepTotals, TokenBatch, scored_by


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores of C target tokens, float32 [C]; [0] if the objective trains no policy."""

    logprobs: Tensor
    """With graph."""
    entropy: Tensor
    """With graph if the objective's ``entropy_gradient`` says so."""
    before: Tensor
    """The same as constants: those of the policy before the step, which makes one update."""
    values: Mapping[str, Tensor] = field(default_factory=dict)
    """Output of each part with a scalar head, by its name; with graph if the part is trained."""
    values_before: Mapping[str, Tensor] = field(default_factory=dict)
    """The same as constants: those of the parts before the step."""
    scalars: Mapping[str, float] = field(default_factory=dict)
    """The objective's own numbers before the step (Objective.scalars): constants."""
    routers: tuple[Tensor, ...] = ()
    """Router logits of each layer of experts, [C, experts], with graph; only if asked for."""


Array = TypeVar("Array", np.ndarray, Tensor)

FLOATS = ("behaviour", "advantage", "weight", "trained", "staleness")


class RowTokens(Protocol):
    """Completion tokens of one row, as places in their batch: see MicroBatch."""

    @property
    def token_index(self) -> Ints: ...
    @property
    def sequence_index(self) -> Ints: ...
    @property
    def sequence_of(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PairColumns(Generic[Array]):
    """P pairs over the sequences of token columns. Arrays are [P]: int64, then float32."""

    winner: Array
    """The better sequence, from 0 to sequences - 1."""
    loser: Array
    weight: Array
    """The pair's share in the step's loss, see pair_weights."""
    margin: Array
    """Difference of the two rewards, above 0."""

    def of(self, row: RowTokens, device: torch.device, sequences: int) -> PairColumns[Tensor]:
        """Pairs of a row, of ``sequences`` in the batch. Raises RuntimeError if one is split."""
        place = np.full(sequences, -1, np.int64)
        place[row.sequence_index] = np.arange(len(row.sequence_index))
        present = place[self.winner] >= 0
        if not np.array_equal(present, place[self.loser] >= 0):
            raise RuntimeError(
                "a pair is split over two rows: the objective needs whole_groups = True"
            )
        places = to_device([place[self.winner][present], place[self.loser][present]], device)
        return PairColumns(
            *places, *to_device([self.weight[present], self.margin[present]], device)
        )


@dataclass(frozen=True, slots=True)
class TokenColumns(Generic[Array]):
    """C completion tokens of S sequences: NumPy arrays of a whole batch, or tensors of a
    micro-batch. All are [C], float32 except ``sequence_of``, which is int64."""

    behaviour: Array
    """Log-prob as sampled."""
    advantage: Array
    """Advantage of the token or of its sequence."""
    weight: Array
    """The token's share in the step's loss, see token_weights."""
    trained: Array
    """1; 0 for a token of an environment, and for one that is masked for its age."""
    staleness: Array
    sequence_of: Array
    """The token's sequence, from 0 to sequences - 1."""
    sequences: int
    reference: Array | None = None
    """Log-prob under the reference model. Of a whole batch: only if a scorer computed it."""
    scored: Mapping[str, Array] = field(default_factory=dict)
    """By scorer: log-prob under its model."""
    pairs: PairColumns[Array] | None = None
    """Pairs, if the objective compares sequences."""

    def of(
        self, row: RowTokens, device: torch.device, reference: Tensor | None
    ) -> TokenColumns[Tensor]:
        """The tokens of one row of this batch, on ``device``."""
        stored = (*FLOATS, "reference") if reference is None else FLOATS
        found = {name: getattr(self, name) for name in stored}
        present: dict[str, Any] = {n: column for n, column in found.items() if column is not None}
        every = *present.values(), *self.scored.values()
        floats = to_device([np.asarray(column)[row.token_index] for column in every], device)
        given: dict[str, Any] = {"reference": reference}
        given |= dict(zip(present, floats, strict=False))
        return TokenColumns(
            **given,
            sequence_of=row.sequence_of,
            sequences=len(row.sequence_index),
            scored=dict(zip(self.scored, floats[len(present) :], strict=True)),
            pairs=None if self.pairs is None else self.pairs.of(row, device, self.sequences),
        )


def token_columns(
    batch: TokenBatch, advantages: NDArray[np.float64], totals: StepTotals, config: Config
) -> TokenColumns[np.ndarray]:
    """Columns of a batch of whole groups. ``advantages``: [S] or, for tokens, [C]. Tokens older
    than the plan allows do not train."""
    loss, length = config.train.loss, batch.length
    _, counted = batch.units(loss.branches)
    scorer = named_scorer(loss.reference)
    advantage = advantages.astype(np.float32)
    age = staleness(batch.version, totals.step, totals.version_epochs)
    trained = batch.trained * (age <= totals.token_age).astype(np.float32)
    return TokenColumns(
        behaviour=batch.behaviour,
        advantage=np.repeat(advantage, length) if len(advantage) == len(length) else advantage,
        weight=token_weights(trained, counted, totals.tokens, totals.sequences, config),
        trained=trained,
        staleness=age.astype(np.float32),
        sequence_of=np.repeat(np.arange(len(length)), length),
        sequences=len(length),
        reference=scored_by(batch, scorer) if scorer and loss.kl_coef else None,
        scored=batch.scored,
    )


def staleness(version: Ints, step: int, epochs: Sequence[tuple[int, int]]) -> Ints:
    """Steps between the state that produced each token and the one that step ``step`` starts from.
    ``epochs``: (first_version, offset) of each VersionEpoch of the plan. Version v, up to the next
    first_version, is the state after step v - offset. Never below 0."""
    first, offset = np.array(sorted(epochs) or [(0, 0)], dtype=np.int64).T
    epoch = np.clip(np.searchsorted(first, version, side="right") - 1, 0, None)
    age: Ints = np.maximum(step - 1 - (version - offset[epoch]), 0)
    return age


def token_weights(
    trained: Floats, length: Ints, tokens: int, sequences: int, config: Config
) -> Floats:
    """trained [C] (1 or 0), length [S] in tokens (their sum is C) of all that counts as one
    sequence -> float32 [C].

    ``tokens`` (trained) and ``sequences`` (with a trained token): of the whole step, on all
    replicas. token_mean: 1 / tokens. sequence_mean: 1 / (the sequence's trainable tokens *
    sequences). sequence_sum: 1 / sequences. dr_grpo: 1 / (longest completion that the run allows *
    sequences). 0 for tokens that are not trained. Sources: token_mean, DAPO, arXiv 2503.14476;
    sequence_mean, GRPO, arXiv 2402.03300; dr_grpo, arXiv 2503.20783.
    """
    if config.train.loss.aggregation == "token_mean":
        return trained / np.float32(max(tokens, 1))
    if config.train.loss.aggregation == "sequence_sum":
        return trained / np.float32(max(sequences, 1))
    if config.train.loss.aggregation == "dr_grpo":
        return trained / np.float32(config.longest_completion * max(sequences, 1))
    return sequence_weights(trained, length, sequences)


def sequence_weights(trained: Floats, length: Ints, sequences: int) -> Floats:
    """Weights of sequence_mean: those of a sequence's trained tokens add up to 1 / sequences."""
    share = np.maximum(trained_by_sequence(trained, length), 1.0) * max(sequences, 1)
    weights: Floats = (trained / np.repeat(share, length)).astype(np.float32)
    return weights


def shares_of_units(batch: TokenBatch, trained: Floats, branches: str) -> Floats | None:
    """float32 [S]: of the trained tokens of all that counts as one sequence, the share of each
    sequence. None: all 1."""
    first, _ = batch.units(branches)
    if len(first) == len(batch.length):
        return None
    counts = trained_by_sequence(trained, batch.length)
    together = np.maximum(np.add.reduceat(counts, first), 1.0)
    shares: Floats = (counts / together[batch.sample_of]).astype(np.float32)
    return shares


def trained_by_sequence(trained: Floats, length: Ints) -> NDArray[np.float64]:
    """Number of trained tokens of each sequence: trained [C] (1 or 0), length [S] -> [S]."""
    starts = np.cumsum(length) - length
    counts: NDArray[np.float64] = np.add.reduceat(trained.astype(np.float64), starts)
    return counts
