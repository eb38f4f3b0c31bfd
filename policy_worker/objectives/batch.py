"""Token batches: groups as they arrive (protobuf), decoded into one array per quantity.

Everything after this file works on whole arrays. The only Python loop over completions is the one
that collects their bytes.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
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

LISTED = 8
"""Groups that the message of one error names."""


class BadGroup(UserError, ValueError):
    """Groups that cannot be trained, and why."""

    def __init__(
        self, message: str, groups: Iterable[GroupKey] = (), fault: str = "payload_invalid"
    ) -> None:
        """``fault``: payload_lost, payload_invalid or out_of_memory."""
        super().__init__(message)
        self.groups = tuple(groups)
        self.fault = fault


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLengths:
    """Lengths of G groups with S sequences (completions): rows are planned by them."""

    prompt_length: Ints
    """[G]"""
    sequences: Ints
    """[G], completions of each group."""
    length: Ints
    """[S], completion tokens of each sequence; at least 1."""

    @property
    def group_of(self) -> Ints:
        """[S], the group each sequence belongs to."""
        return np.repeat(np.arange(len(self.sequences)), self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch(GroupLengths):
    """Groups in columns. C completion tokens, P prompt tokens."""

    prompt_tokens: Ints
    """[P], group after group."""
    tokens: Ints
    """[C], sequence after sequence."""
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
    """[C] each, by scorer: log-probability of each token under its model."""


def key_of(group: rollout_pb2.Group) -> GroupKey:
    return group.task.task_id, group.task.attempt


def decode(groups: Sequence[rollout_pb2.Group]) -> TokenBatch:
    """Columns of ``groups``, in their order. Raises BadGroup with those that contradict themselves.

    The digest only says that a payload is what its worker sent. One column of another length would
    shift the numbers of all sequences after it.
    """
    completions = [completion for group in groups for completion in group.completions]
    tokens = [c.tokens for c in completions]
    masks = [c.loss_mask or b"\x01" * (len(c.tokens) // 4) for c in completions]
    spans = [span for c in completions for span in c.versions]
    rewards = [reward for c in completions for reward in c.token_rewards]
    scorers = set().union(*(c.columns for c in completions))
    sequences = _ints(len(g.completions) for g in groups)
    size = _ints(map(len, tokens))
    length = size // 4
    wrong = (size == 0) | (size % 4 > 0) | (_ints(map(len, masks)) * 4 != size)
    wrong |= _ints(len(c.logprobs) for c in completions) != size
    wrong |= _ints(sum(s.length for s in c.versions) for c in completions) != length
    wrong |= np.repeat(_ints(len(g.prompt_tokens) % 4 for g in groups) > 0, sequences)
    for name in scorers:
        wrong |= _ints(len(c.columns.get(name, b"")) for c in completions) != size
    if rewards:
        wrong |= np.array(
            [_misplaced(c.token_rewards, n) for c, n in zip(completions, length, strict=True)]
        )
    refuse_groups(
        groups,
        np.unique(np.repeat(np.arange(len(groups)), sequences)[wrong]),
        "its tokens, log-probs, masks, versions, numbers of scorers and token rewards do not fit "
        "one another",
    )
    starts = np.repeat(np.cumsum(length) - length, _ints(len(c.token_rewards) for c in completions))
    return TokenBatch(
        prompt_tokens=_joined([g.prompt_tokens for g in groups], "<i4").astype(np.int64),
        prompt_length=_ints(len(g.prompt_tokens) // 4 for g in groups),
        sequences=sequences,
        tokens=_joined(tokens, "<i4").astype(np.int64),
        length=length,
        behaviour=_joined([c.logprobs for c in completions], "<f4").astype(np.float32),
        trained=_joined(masks, np.uint8).astype(np.float32),
        version=np.repeat(_ints(s.version for s in spans), _ints(s.length for s in spans)),
        reward=np.array([c.reward for c in completions], dtype=np.float64),
        rewarded=_ints(r.token for r in rewards) + starts,
        token_reward=np.array([r.reward for r in rewards], dtype=np.float64),
        scored={
            name: _joined([c.columns[name] for c in completions], "<f4").astype(np.float32)
            for name in sorted(scorers)
        },
        truncated=np.array([c.finish_reason for c in completions])
        == rollout_pb2.FINISH_REASON_LENGTH,
    )


def _misplaced(rewards: Sequence[rollout_pb2.TokenReward], length: int) -> bool:
    """True if ``rewards`` name a token that is not there, or not in rising order."""
    places = [reward.token for reward in rewards]
    return any(a >= b for a, b in pairwise([-1, *places, length]))


def _ints(values: Iterable[int]) -> Ints:
    return np.array([*values], dtype=np.int64)


def _joined(parts: Sequence[bytes], dtype: Any) -> NDArray[Any]:
    return np.frombuffer(b"".join(parts), dtype=dtype)


def refuse_groups(groups: Sequence[rollout_pb2.Group], which: Ints, why: str) -> None:
    """Raises BadGroup with the groups ``which``, if any."""
    if keys := [key_of(groups[int(g)]) for g in which]:
        names = ", ".join(task_id for task_id, _ in keys[:LISTED])
        raise BadGroup(f"group {names}: {why}", keys)


def scored_by(batch: TokenBatch, name: str) -> Floats:
    """[C], the log-probs of the scorer ``name``. Raises BadGroup if the groups have none."""
    if name not in batch.scored:
        raise BadGroup(f"the groups have no log-probs of the scorer {name}")
    return batch.scored[name]


def check_values(batch: TokenBatch, groups: Sequence[rollout_pb2.Group], vocabulary: int) -> None:
    """Raises BadGroup with the groups that have a token id without a row in an embedding of
    ``vocabulary`` rows, or a number that is not finite."""
    group_of = batch.group_of
    of_token = np.repeat(group_of, batch.length)
    of_prompt = np.repeat(np.arange(len(groups)), batch.prompt_length)
    ids = np.concatenate([batch.tokens, batch.prompt_tokens])
    strange = (ids < 0) | (ids >= vocabulary)
    if strange.any():
        unknown = np.unique(np.concatenate([of_token, of_prompt])[strange])
        why = f"token {ids[strange][0]} is outside the vocabulary, the model knows {vocabulary}"
        refuse_groups(groups, unknown, why)
    numbers: list[tuple[NDArray[Any], Ints]] = [
        (batch.reward, group_of),
        (batch.token_reward, of_token[batch.rewarded]),
        *((column, of_token) for column in (batch.behaviour, *batch.scored.values())),
    ]
    broken = [place[~np.isfinite(column)] for column, place in numbers]
    refuse_groups(groups, np.unique(np.concatenate(broken)), "log-probs or rewards are not finite")


def staleness(version: Ints, step: int, epochs: Sequence[tuple[int, int]]) -> Ints:
    """Steps between the state that produced each token and the one that step ``step`` starts from.
    ``epochs``: (first_version, offset) of each VersionEpoch of the plan. Version v, up to the next
    first_version, is the state after step v - offset. Never below 0."""
    first, offset = np.array(sorted(epochs) or [(0, 0)], dtype=np.int64).T
    epoch = np.clip(np.searchsorted(first, version, side="right") - 1, 0, None)
    age: Ints = np.maximum(step - 1 - (version - offset[epoch]), 0)
    return age


@dataclass(frozen=True, slots=True)
class StepTotals:
    """The totals that all members of a step share."""

    step: Step
    version: Version
    tokens: int
    sequences: int
    version_epochs: tuple[tuple[int, int], ...] = ()
    """(first_version, offset) of each VersionEpoch of the plan."""
    oldest_step: Step = Step(0)
    """Tokens of states before it are masked; ``tokens`` does not count them."""
    samples: int = 0
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
        """Standard deviation of a sample, over all sequences of the step."""
        return math.sqrt(self.reward_squares / max(self.samples - 1, 1))

    @property
    def within_std(self) -> float:
        """Standard deviation of a sample, of the differences from the groups' means."""
        return math.sqrt(self.within_squares / max(self.samples - 1, 1))

    @property
    def token_age(self) -> int:
        """Age of the oldest tokens that are not masked."""
        return self.step - 1 - self.oldest_step

    @classmethod
    def of(cls, plan: policy_pb2.StepPlan) -> "StepTotals":
        epochs = tuple((epoch.first_version, epoch.offset) for epoch in plan.version_epochs)
        step, version = Step(plan.step), Version(plan.version)
        totals = plan.total_tokens, plan.total_sequences
        rewards = plan.reward_sum, plan.reward_squares, plan.within_squares
        oldest = Step(plan.oldest_step)
        return cls(step, version, *totals, epochs, oldest, plan.total_samples, *rewards)
