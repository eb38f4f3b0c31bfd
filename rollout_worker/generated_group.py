"""Generated groups: the completions of a lease, and the message with their rewards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.prompt_tokenizer import Prompt
from paceline.v1 import common_pb2, rollout_pb2
from rollout_worker.engine.base import Completion, Finish
from rollout_worker.rewards.builtin import answer_of_text
from rollout_worker.rewards.scoring import Scores

FINISH_REASONS = {
    Finish.STOP: rollout_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: rollout_pb2.FINISH_REASON_LENGTH,
    Finish.PARTIAL: rollout_pb2.FINISH_REASON_UNSPECIFIED,
}
_MAX_TEXT = 1 << 16  # Characters of a text that are sent along; texts are for people


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


def group_message(
    lease: rollout_pb2.Lease,
    made: GeneratedGroup,
    scores: Scores,
    *,
    generate_s: float,
    vote: str = "",
) -> rollout_pb2.Group:
    """``vote``: what the completions vote on (see answer_of_text); "": on nothing."""
    scored = zip(made.completions, made.texts, scores.rewards, scores.components, strict=True)
    group = rollout_pb2.Group(
        task=lease.task,
        kind=lease.kind,
        prompt_tokens=token_bytes(made.prompt.tokens),
        completions=[
            rollout_pb2.Completion(
                **completion_fields(completion),
                reward=reward,
                reward_components=components,
                text=text[:_MAX_TEXT],
                answer=answer_of_text(vote, text) if vote else "",
            )
            for completion, text, reward, components in scored
        ],
        generate_s=generate_s,
        reward_s=scores.seconds,
        prompt_text=made.prompt.text[:_MAX_TEXT],
        prompt_cut=made.prompt.cut,
    )
    for completion, mask in zip(group.completions, made.masks, strict=False):
        completion.loss_mask = b"" if mask.all() else mask.tobytes()
    for index, placed in enumerate(scores.placed):
        places = made.turn_ends[index] if made.turn_ends else range(len(placed))
        for token, reward in zip(places, placed, strict=True) if placed else ():
            group.completions[index].token_rewards.add(token=token, reward=reward)
    return group


def text_of(completion: Completion, text: str) -> str:
    """The completion's text for rewards: without the stop string and what follows it."""
    if completion.stop is None:
        return text
    at = text.find(completion.stop)
    return text if at < 0 else text[:at]
