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
class GeneratedGroup:
    prompt: Prompt
    completions: tuple[Completion, ...]
    texts: list[str]
    scored: Mapping[str, list[Any]]  # Arguments of the reward functions; see Job.each
    scores: Scores | None = None  # Scores from an environment that scores by itself
    masks: Sequence[NDArray[np.uint8]] = ()
    """1 where the model produced the token; empty: it produced all."""
    turn_ends: Sequence[Sequence[int]] = ()
    """Positions of the last token of each turn of the model; empty: there are no turns."""


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
