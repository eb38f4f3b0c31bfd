"""Protobuf messages of completions and scored groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.v1 import common_pb2, rollout_pb2
from rollout_worker.engine.base import Completion, Finish
from rollout_worker.rewards.scoring import Scores
from rollout_worker.tokenizer import Prompt

FINISH = {
    Finish.STOP: rollout_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: rollout_pb2.FINISH_REASON_LENGTH,
    Finish.PARTIAL: rollout_pb2.FINISH_REASON_UNSPECIFIED,
}
_MAX_TEXT = 1 << 16
"""Characters of a text that are sent along; texts are for people."""
_BATCH_BYTES = 8 << 20

_Group = TypeVar("_Group", rollout_pb2.Group, rollout_pb2.PartialGroup)


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
        "finish_reason": FINISH[completion.finish],
    }


def group_message(
    lease: rollout_pb2.Lease,
    prompt: Prompt,
    completions: Sequence[Completion],
    texts: Sequence[str],
    scores: Scores,
    *,
    generate_s: float,
) -> rollout_pb2.Group:
    """``completions``, ``texts`` and ``scores`` in the same order."""
    scored = zip(completions, texts, scores.rewards, scores.components, strict=True)
    return rollout_pb2.Group(
        task=lease.task,
        kind=lease.kind,
        prompt_tokens=token_bytes(prompt.tokens),
        completions=[
            rollout_pb2.Completion(
                **completion_fields(completion),
                reward=reward,
                reward_components=components,
                text=text[:_MAX_TEXT],
            )
            for completion, text, reward, components in scored
        ],
        generate_s=generate_s,
        reward_s=scores.seconds,
        prompt_text=prompt.text[:_MAX_TEXT],
    )


def first_batch(groups: Iterable[_Group], max_message_bytes: int) -> list[_Group]:
    """The first groups that together fit into one request; at least one."""
    batch: list[_Group] = []
    size = 0
    for group in groups:
        size += group.ByteSize()
        if batch and size > min(_BATCH_BYTES, max_message_bytes):
            break
        batch.append(group)
    return batch


def text_of(completion: Completion, text: str) -> str:
    """The completion's text for rewards: without the stop string and what follows it."""
    if completion.stop is None:
        return text
    at = text.find(completion.stop)
    return text if at < 0 else text[:at]
