"""A scored group as the message that carries it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.v1 import common_pb2, rollout_pb2
from rollout_worker.engine.base import Completion, Finish
from rollout_worker.rewards.scoring import Scores
from rollout_worker.tokenizer import Prompt

_FINISH = {
    Finish.STOP: rollout_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: rollout_pb2.FINISH_REASON_LENGTH,
}
_MAX_TEXT = 1 << 16
"""Characters of a text that are sent along; texts are for people."""


def group_message(
    lease: rollout_pb2.Lease,
    prompt: Prompt,
    samples: Sequence[Completion],
    texts: Sequence[str],
    scores: Scores,
    *,
    generate_s: float,
) -> rollout_pb2.Group:
    """``samples``, ``texts`` and ``scores`` in the same order."""
    completions = []
    for sample, text, reward, components in zip(
        samples, texts, scores.rewards, scores.components, strict=True
    ):
        completions.append(
            rollout_pb2.Completion(
                tokens=np.ascontiguousarray(sample.tokens, dtype="<i4").tobytes(),
                logprobs=np.ascontiguousarray(sample.logprobs, dtype="<f4").tobytes(),
                versions=[
                    common_pb2.VersionSpan(version=version, length=length)
                    for version, length in sample.versions
                ],
                finish_reason=_FINISH[sample.finish],
                reward=reward,
                reward_components=components,
                text=text[:_MAX_TEXT],
            )
        )
    return rollout_pb2.Group(
        task=lease.task,
        kind=lease.kind,
        prompt_tokens=np.ascontiguousarray(prompt.tokens, dtype="<i4").tobytes(),
        completions=completions,
        generate_s=generate_s,
        reward_s=scores.seconds,
        prompt_text=prompt.text[:_MAX_TEXT],
    )


def text_of(sample: Completion, text: str) -> str:
    """The completion's text as rewards see it: without the stop string and what follows it."""
    if sample.stop is None:
        return text
    at = text.find(sample.stop)
    return text if at < 0 else text[:at]
