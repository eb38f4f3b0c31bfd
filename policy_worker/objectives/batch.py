"""Token batches: groups in columns, one array per quantity; and the totals of their step."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UserError
from paceline.ids import Step, Version
from paceline.payloads.routes import Routes
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLengths:
    """Lengths of G groups with S sequences (completions): rows are planned by them."""

    prompt_length: Ints
    """[G]"""
    sequences: Ints
    """[G], completions of each group."""
    length: Ints
    """[S], completion tokens of each sequence; at least 1."""
    prefix: Ints
    """[S], tokens of each sequence's path before its own: the prompt, or what it shares with an
    earlier sequence of its sample."""

    @property
    def group_of(self) -> Ints:
        """[S], the group each sequence belongs to."""
        return np.repeat(np.arange(len(self.sequences)), self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch(GroupLengths):
    """Groups in columns. C completion tokens, P prompt tokens."""

    parent: Ints
    """[S], what each sequence goes on from, as a run: g, the prompt of group g; G + s, the sequence
    s; or -1, nothing."""
    sample_of: Ints
    """[S], not falling: the sample of each sequence, from 0."""
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
    """[S], of the sequence's sample, rewards of tokens included."""
    rewarded: Ints
    """[R], the tokens that have a reward of their own, rising: positions in [0, C)."""
    token_reward: NDArray[np.float64]
    """[R], their rewards."""
    truncated: NDArray[np.bool_]
    """[S], whether the sequence was cut at the length limit."""
    scored: Mapping[str, Floats] = field(default_factory=dict)
    """[C] each, by scorer: log-probability of each token under its model."""
    routes: Routes | None = None
    """[C, W], experts of each token as the engine chose them, layer after layer; None: no group of
    the batch has any."""
    prompt_routes: Routes | None = None
    """[P, W]"""

    @property
    def firsts(self) -> Ints:
        """[N], the first sequence of each sample."""
        return np.flatnonzero(np.diff(self.sample_of, prepend=-1))

    def units(self, branches: str) -> tuple[Ints, Ints]:
        """[U] each: the first sequence, and the tokens, of all that counts as one sequence by
        ``train.loss.branches``."""
        first = self.firsts if branches == "sample" else np.arange(len(self.length))
        return first, np.add.reduceat(self.length, first)

    @property
    def samples(self) -> Ints:
        """[G], samples of each group."""
        return np.bincount(self.group_of[self.firsts], minlength=len(self.sequences))


def key_of(group: rollout_pb2.Group) -> GroupKey:
    return group.task.task_id, group.task.attempt


def scored_by(batch: TokenBatch, name: str) -> Floats:
    """[C], the log-probs of the scorer ``name``. Raises BadGroup if the groups have none."""
    if name not in batch.scored:
        raise BadGroup(f"the groups have no log-probs of the scorer {name}")
    return batch.scored[name]


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
        """Standard deviation, with n - 1, of the rewards of all samples of the step."""
        return math.sqrt(self.reward_squares / max(self.samples - 1, 1))

    @property
    def within_std(self) -> float:
        """The same, of the differences from the groups' means."""
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
