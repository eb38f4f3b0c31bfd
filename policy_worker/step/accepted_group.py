"""Accepted group: what the plan of a step says of a group, before its payload is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.v1 import policy_pb2
from policy_worker.step.batch import GroupKey, Ints


@dataclass(frozen=True, slots=True)
class AcceptedGroup:
    """A payload that disagrees with it is invalid. Numbers and digests are 0 and empty if the plan
    has none."""

    key: GroupKey
    tokens: int = 0
    """To train on, over all sequences."""
    sequences: int = 0
    prompt_tokens: int = 0
    lengths: tuple[int, ...] = ()
    """Tokens of each sequence, those that are not trained included. Empty: known only to who reads
    the payload."""
    digest: str = ""
    """Of the payload."""
    facts: str = ""
    """Digest of all facts."""

    @classmethod
    def of(cls, key: GroupKey, planned: policy_pb2.PlannedGroup) -> AcceptedGroup:
        return cls(
            key,
            planned.tokens,
            planned.sequences,
            planned.prompt_tokens,
            tuple(planned.lengths),
            planned.digest,
            planned.facts,
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> AcceptedGroup:
        """From asdict() that has gone through JSON."""
        task_id, attempt = value["key"]
        return cls(**{**value, "key": (task_id, attempt), "lengths": tuple(value["lengths"])})


@dataclass(frozen=True, slots=True)
class Outline:
    """Lengths of groups: what rows are planned by. G groups, S sequences."""

    prompt_length: Ints
    """[G]"""
    sequences: Ints
    """[G]"""
    length: Ints
    """[S], completion tokens."""

    @property
    def group_of(self) -> Ints:
        """[S]"""
        return np.repeat(np.arange(len(self.sequences)), self.sequences)

    @classmethod
    def of(cls, groups: Sequence[AcceptedGroup]) -> Outline | None:
        """None if the lengths of a group are not known."""
        if not all(group.lengths for group in groups):
            return None
        return cls(
            prompt_length=np.array([g.prompt_tokens for g in groups], dtype=np.int64),
            sequences=np.array([len(g.lengths) for g in groups], dtype=np.int64),
            length=np.array([n for g in groups for n in g.lengths], dtype=np.int64),
        )
