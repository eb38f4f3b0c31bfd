"""Limits of groups: what the config allows a worker to submit."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config.model_config import vocabulary_size
from paceline.config.schema import Config

ANY = 1 << 40
"""A limit above every number of tokens and versions."""


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
