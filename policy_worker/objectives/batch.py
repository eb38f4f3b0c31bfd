"""Token batches: groups as they arrive (protobuf), decoded into one array per quantity.

Everything after this file works on whole arrays. The only Python loop over completions is the one
that collects their bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UserError
from paceline.ids import Step, Version
from paceline.v1 import policy_pb2, rollout_pb2

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


GroupKey = tuple[str, int]
"""Task id and attempt."""


class BadGroup(UserError, ValueError):
    """Groups that cannot be trained, and why."""

    def __init__(
        self, message: str, groups: Iterable[GroupKey] = (), fault: str = "payload_invalid"
    ) -> None:
        """``fault``: payload_lost, payload_invalid or out_of_memory."""
        super().__init__(message)
        self.groups = tuple(groups)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Groups in columns. G groups, S sequences (completions), C completion tokens, P prompt tokens."""

    prompt_tokens: Ints
    """[P], group after group."""
    prompt_length: Ints
    """[G]"""
    sequences: Ints
    """[G], completions of each group."""
    tokens: Ints
    """[C], sequence after sequence."""
    length: Ints
    """[S], completion tokens of each sequence; at least 1."""
    behaviour: Floats
    """[C], log-probability of each token as it was sampled."""
    trained: Floats
    """[C], 1 for a token of the model, 0 for one of an environment."""
    version: Ints
    """[C], weight version that produced the token."""
    reward: NDArray[np.float64]
    """[S], of whole sequences, rewards of tokens included."""
    rewarded: Ints
    """[R], the tokens that have a reward of their own, rising: positions in [0, C)."""
    token_reward: NDArray[np.float64]
    """[R], their rewards."""
    truncated: NDArray[np.bool_]
    """[S], whether the sequence was cut at the length limit."""
    scored: Mapping[str, Floats] = field(default_factory=dict)
    """[C] each, by scorer: log-probability of each token under its model. Empty if the run has no
    such scorer."""

    @property
    def group_of(self) -> Ints:
        """[S], the group each sequence belongs to."""
        return np.repeat(np.arange(len(self.sequences)), self.sequences)


def decode(groups: Sequence[rollout_pb2.Group]) -> TokenBatch:
    """Columns of ``groups``, in their order. Raises BadGroup if lengths contradict one another."""
    try:
        return _columns(groups)
    except BadGroup:
        raise
    except ValueError as error:
        # From NumPy, if the bytes are no whole number of tokens.
        raise _contradiction(groups) from error


def _columns(groups: Sequence[rollout_pb2.Group]) -> TokenBatch:
    completions = [completion for group in groups for completion in group.completions]
    tokens = np.frombuffer(b"".join([c.tokens for c in completions]), dtype="<i4")
    length = np.array([len(c.tokens) for c in completions], dtype=np.int64) // 4
    behaviour = np.frombuffer(b"".join([c.logprobs for c in completions]), dtype="<f4")
    mask_bytes = [c.loss_mask or b"\x01" * (len(c.tokens) // 4) for c in completions]
    trained = np.frombuffer(b"".join(mask_bytes), dtype=np.uint8)
    spans = [span for c in completions for span in c.versions]
    span_length = np.array([span.length for span in spans], dtype=np.int64)
    version = np.repeat(np.array([span.version for span in spans], dtype=np.int64), span_length)
    scored = _scored(groups, completions)
    if not len(tokens) == len(behaviour) == len(trained) == len(version):
        raise _contradiction(groups)
    rewarded, token_reward = _token_rewards(completions, length)
    return TokenBatch(
        prompt_tokens=np.frombuffer(
            b"".join([group.prompt_tokens for group in groups]), dtype="<i4"
        ).astype(np.int64),
        prompt_length=np.array([len(g.prompt_tokens) for g in groups], dtype=np.int64) // 4,
        sequences=np.array([len(g.completions) for g in groups], dtype=np.int64),
        tokens=tokens.astype(np.int64),
        length=length,
        behaviour=behaviour.astype(np.float32),
        trained=trained.astype(np.float32),
        version=version,
        reward=np.array([c.reward for c in completions], dtype=np.float64),
        rewarded=rewarded,
        token_reward=token_reward,
        scored=scored,
        truncated=np.array([c.finish_reason for c in completions])
        == rollout_pb2.FINISH_REASON_LENGTH,
    )


def _token_rewards(
    completions: Sequence[rollout_pb2.Completion], length: Ints
) -> tuple[Ints, NDArray[np.float64]]:
    """Positions in the batch, and rewards. Raises ValueError for a token that its completion does
    not have."""
    starts = np.cumsum(length) - length
    count = np.array([len(c.token_rewards) for c in completions], dtype=np.int64)
    found = [r for c in completions for r in c.token_rewards]
    token = np.array([r.token for r in found], dtype=np.int64)
    if (token >= np.repeat(length, count)).any():
        raise ValueError("a reward of a token that is none")
    at = token + np.repeat(starts, count)
    if (np.diff(at) <= 0).any():
        raise ValueError("rewards of tokens in another order")
    return at, np.array([r.reward for r in found], dtype=np.float64)


def _scored(
    groups: Sequence[rollout_pb2.Group], completions: Sequence[rollout_pb2.Completion]
) -> dict[str, Floats]:
    """The columns of scorers. Raises BadGroup unless every completion has each, with a number for
    each token."""
    names = sorted({name for completion in completions for name in completion.columns})
    for group in groups if names else ():
        for completion in group.completions:
            for name in names:
                if len(completion.columns.get(name, b"")) != len(completion.tokens):
                    raise BadGroup(
                        f"group {group.task.task_id} has no number for each token from the scorer {name}",
                        [(group.task.task_id, group.task.attempt)],
                    )
    return {
        name: np.frombuffer(b"".join([c.columns[name] for c in completions]), dtype="<f4").astype(
            np.float32
        )
        for name in names
    }


def scored_by(batch: TokenBatch, name: str) -> Floats:
    """[C], the log-probs of the scorer ``name``. Raises BadGroup if the groups have none."""
    if name not in batch.scored:
        raise BadGroup(f"the groups have no log-probs of the scorer {name}")
    return batch.scored[name]


def check_vocabulary(batch: TokenBatch, groups: Sequence[rollout_pb2.Group], rows: int) -> None:
    """Raises BadGroup if a token id has no row in an embedding of ``rows``."""
    for tokens, length in (
        (batch.tokens, np.bincount(batch.group_of, batch.length).astype(np.int64)),
        (batch.prompt_tokens, batch.prompt_length),
    ):
        strange = np.flatnonzero((tokens < 0) | (tokens >= rows))
        if len(strange):
            group = groups[int(np.searchsorted(np.cumsum(length), strange[0], side="right"))]
            raise BadGroup(
                f"token {tokens[strange[0]]} in group {group.task.task_id}: the model knows {rows}",
                [(group.task.task_id, group.task.attempt)],
            )


def staleness(version: Ints, step: int, epochs: Sequence[tuple[int, int]]) -> Ints:
    """Steps between the state that produced each token and the one that step ``step`` starts from.

    ``epochs``: (first_version, offset) of each VersionEpoch of the plan. Version v, up to the next
    first_version, is the state after step v - offset. Never below 0.
    """
    first, offset = np.array(sorted(epochs) or [(0, 0)], dtype=np.int64).T
    epoch = np.clip(np.searchsorted(first, version, side="right") - 1, 0, None)
    age: Ints = np.maximum(step - 1 - (version - offset[epoch]), 0)
    return age


def _contradiction(groups: Sequence[rollout_pb2.Group]) -> BadGroup:
    for group in groups:
        for index, c in enumerate(group.completions):
            counts = {
                "tokens": len(c.tokens) / 4,
                "logprobs": len(c.logprobs) / 4,
                "loss_mask": len(c.loss_mask) or len(c.tokens) / 4,
                "versions": sum(span.length for span in c.versions),
            }
            rewarded = [r.token for r in c.token_rewards]
            if rewarded != sorted(set(rewarded)) or max(rewarded, default=0) >= counts["tokens"]:
                return BadGroup(
                    f"group {group.task.task_id} completion {index}: token_rewards name tokens "
                    "that it does not have, or not in rising order",
                    [(group.task.task_id, group.task.attempt)],
                )
            if len(set(counts.values())) != 1:
                return BadGroup(
                    f"group {group.task.task_id} completion {index}: lengths differ: {counts}",
                    [(group.task.task_id, group.task.attempt)],
                )
    return BadGroup("groups whose lengths differ")


@dataclass(frozen=True, slots=True)
class StepTotals:
    """The totals that all members of a step share."""

    step: Step
    version: Version
    """Of the state before the step."""
    tokens: int
    sequences: int
    """With a token that is trained."""
    version_epochs: tuple[tuple[int, int], ...] = ()
    """(first_version, offset) of each VersionEpoch of the plan."""
    oldest_step: Step = Step(0)
    """Tokens of states before it are masked; ``tokens`` does not count them."""
    samples: int = 0
    """All sequences of the step."""
    reward_sum: float = 0.0
    reward_squares: float = 0.0
    """Sum of the squares of each reward's difference from the mean of all. (Sums of plain squares
    would lose the deviation of large rewards that are close to one another.)"""
    within_squares: float = 0.0
    """Sum of the squares of each reward's difference from the mean of its group."""

    @property
    def reward_mean(self) -> float:
        return self.reward_sum / max(self.samples, 1)

    @property
    def reward_std(self) -> float:
        """Of a sample, over all sequences of the step."""
        return math.sqrt(self.reward_squares / max(self.samples - 1, 1))

    @property
    def within_std(self) -> float:
        """Of a sample, of the differences from the means of the groups: their mean over the step is
        0."""
        return math.sqrt(self.within_squares / max(self.samples - 1, 1))

    @property
    def token_age(self) -> int:
        """Age of the oldest tokens that are not masked."""
        return self.step - 1 - self.oldest_step

    @classmethod
    def of(cls, plan: policy_pb2.StepPlan) -> StepTotals:
        epochs = tuple((epoch.first_version, epoch.offset) for epoch in plan.version_epochs)
        step, version = Step(plan.step), Version(plan.version)
        totals = plan.total_tokens, plan.total_sequences
        rewards = plan.reward_sum, plan.reward_squares, plan.within_squares
        oldest = Step(plan.oldest_step)
        return cls(step, version, *totals, epochs, oldest, plan.total_samples, *rewards)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StepTotals:
        """From asdict() that has gone through JSON."""
        epochs = tuple(tuple(epoch) for epoch in value["version_epochs"])
        return cls(**{**value, "version_epochs": epochs})
