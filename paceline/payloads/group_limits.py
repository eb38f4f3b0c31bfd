"""Refusal of malformed messages, and limits of groups: what the config allows a worker to submit.

An error names the field, its fault, and the values that are allowed.
"""

import re
from dataclasses import dataclass

from paceline.config.model_files import vocabulary_size
from paceline.config.schema import Config
from paceline.config.sections.workers import MAX_BRANCHES
from paceline.ids import TaskId
from paceline.v1 import common_pb2, rollout_pb2

TASK_ID = re.compile(r"t\d{1,15}|e\d{1,9}\.\d{1,9}")


class Invalid(ValueError):
    """The request, or one group in it, is malformed. Nothing has changed."""


def check_task(task: common_pb2.TaskRef) -> tuple[TaskId, int]:
    if not TASK_ID.fullmatch(task.task_id):
        raise Invalid(f"task.task_id {task.task_id[:80]!r} is not a task id")
    if task.attempt < 1:
        raise Invalid(f"task.attempt of {task.task_id} must be 1 or more")
    return TaskId(task.task_id), task.attempt


def check_text(text: str, field: str, limit: int = 4096) -> str:
    if len(text) > limit:
        raise Invalid(f"{field} is longer than {limit} characters")
    return text


MAX_REWARD = 1e9
"""Largest magnitude of a reward and its components: sums of squares stay finite in float32."""


def usable_reward(value: float) -> bool:
    """True if ``value`` is finite and within MAX_REWARD (comparisons of a NaN are false)."""
    return abs(value) <= MAX_REWARD


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """Limits that the config sets for every group."""

    group_size: int
    max_sequence_tokens: int
    """Longest prompt or completion, environment tokens included."""
    vocabulary: int | None = None
    """Token ids must be below it. None: this controller does not know the vocabulary."""
    eval_samples: int = 1
    """Most completions of an evaluation's prompt; the ledger knows those of each set."""
    columns: frozenset[str] = frozenset()
    """Scorers whose log-probs every completion to train has."""
    each_branch: bool = False
    """train.loss.branches: True if each sequence of a sample counts."""
    branches: int = MAX_BRANCHES
    """Most sequences of a sample."""

    @classmethod
    def of(cls, config: Config) -> "GroupLimits":
        vocabulary = vocabulary_size(config.model.path)
        samples = max((each.samples for each in config.evaluation.sets.values()), default=1)
        columns = {
            n
            for n, s in config.scorers.by_name.items()
            if s.kind == "logprobs" and not config.recorded
        }
        return cls(
            config.rollout.group_size,
            config.longest_sequence,
            vocabulary,
            samples,
            frozenset(columns),
            config.train.loss.branches == "each",
            config.most_branches,
        )


def task_settings(config: Config) -> rollout_pb2.TaskSettings:
    """Settings of a task that may change during a run, as ``config`` has them now."""
    rollout = config.rollout
    return rollout_pb2.TaskSettings(
        max_tokens=rollout.max_tokens,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_turns=rollout.max_turns,
        environment_timeout_s=rollout.environment_timeout_s,
        reward_timeout_s=config.reward.timeout_s,
    )
