"""Generated groups: the completions of a lease, as the engine or an environment made them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.prompt_tokenizer import Prompt
from paceline.v1 import common_pb2, rollout_pb2
from rollout_worker.engine.base import Completion, Finish
from rollout_worker.rewards.scoring import Scores

FINISH_REASONS = {
    Finish.STOP: rollout_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: rollout_pb2.FINISH_REASON_LENGTH,
    Finish.PARTIAL: rollout_pb2.FINISH_REASON_UNSPECIFIED,
}


@dataclass(frozen=True, slots=True)
class SharedPath:
    """The tokens that a branch has before its own."""

    of: int  # Number of the completion that it leaves, in the group
    tokens: NDArray[np.int32]
    text: str

    @property
    def message(self) -> rollout_pb2.Branch:
        return rollout_pb2.Branch(of=self.of, prefix=len(self.tokens))


@dataclass(frozen=True, slots=True)
class GeneratedGroup:
    """``completions``, ``texts``, ``masks`` and ``branches``: one for each sequence, those of a
    sample side by side. ``scored``, ``scores`` and ``turn_ends``: one for each sample."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    texts: list[str]
    scored: Mapping[str, list[Any]]  # Arguments of the reward functions; see Job.each
    scores: Scores | None = None  # Scores from an environment that scores by itself
    masks: Sequence[NDArray[np.uint8]] = ()
    """1 where the model produced the token; empty: it produced all."""
    turn_ends: Sequence[Sequence[tuple[int, int]]] = ()
    """Sequence and position of the last token of each turn of the model, in the order in which they
    were asked for; empty: there are no turns."""
    branches: Sequence[SharedPath | None] = ()
    """None: the first sequence of a sample. Empty: each sequence is."""

    @property
    def firsts(self) -> list[int]:
        """The first sequence of each sample."""
        if not self.branches:
            return list(range(len(self.completions)))
        return [number for number, branch in enumerate(self.branches) if branch is None]

    @property
    def newest(self) -> list[int]:
        """The sequence of each sample that has its newest turn."""
        return [turns[-1][0] for turns in self.turn_ends] or self.firsts

    def lengths(self) -> list[int]:
        """The longest sequence of each sample, in tokens after the group's prompt."""
        longest: list[int] = []
        prompt = len(self.prompt.tokens)
        for number, completion in enumerate(self.completions):
            branch, length = self.branch_of(number), len(completion.tokens)
            if branch is None:
                longest.append(length)
            else:
                longest[-1] = max(longest[-1], len(branch.tokens) + length - prompt)
        return longest

    def branch_of(self, number: int) -> SharedPath | None:
        return self.branches[number] if self.branches else None


def token_bytes(tokens: NDArray[np.int32]) -> bytes:
    return np.ascontiguousarray(tokens, dtype="<i4").tobytes()


def completion_fields(completion: Completion) -> dict[str, Any]:
    """The fields that Completion and PartialCompletion share."""
    return {
        "tokens": token_bytes(completion.tokens),
        "logprobs": np.ascontiguousarray(completion.logprobs, dtype="<f4").tobytes(),
        "versions": [
            common_pb2.VersionSpan(version=version, length=length)
            for version, length in completion.versions
        ],
        "finish_reason": FINISH_REASONS[completion.finish],
    }


def text_of(completion: Completion, text: str) -> str:
    """The completion's text for rewards: without the stop string and what follows it."""
    if completion.stop is None:
        return text
    at = text.find(completion.stop)
    return text if at < 0 else text[:at]
