"""Limits of groups: what the config allows a worker to submit."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.model_files import vocabulary_size
from paceline.config.schema import Config
from paceline.v1 import rollout_pb2


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

    @classmethod
    def of(cls, config: Config) -> GroupLimits:
        vocabulary = vocabulary_size(config.model.path)
        samples = max((each.samples for each in config.evaluation.sets.values()), default=1)
        columns = {
            n
            for n, s in config.scorers.by_name.items()
            if s.kind == "logprobs" and not config.recorded
        }
        longest = config.longest_sequence
        return cls(config.rollout.group_size, longest, vocabulary, samples, frozenset(columns))


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
