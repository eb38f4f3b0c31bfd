"""What an attempt at a task leaves for the next one, as a message and back.

- Tokens, log-probs and versions go on as they were. The next attempt's random numbers are those of
  the same seed, sample and position (see Engine.exact_continuation).
- A prefix is used behind the very prompt that it continues, and only up to the version that the
  engine serves: within a completion versions never fall.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.v1 import common_pb2, rollout_pb2
from rollout_worker.engine.base import Completion, Finish

_FINISH = {
    Finish.STOP: rollout_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: rollout_pb2.FINISH_REASON_LENGTH,
    Finish.PARTIAL: rollout_pb2.FINISH_REASON_UNSPECIFIED,
}
_ENDS = {reason: finish for finish, reason in _FINISH.items()}


def partial_group(
    task: common_pb2.TaskRef, prompt_tokens: NDArray[np.int32], samples: Sequence[Completion | None]
) -> rollout_pb2.PartialGroup:
    """``samples``: one for each completion wanted; None: nothing of it yet."""
    return rollout_pb2.PartialGroup(
        task=task,
        prompt_tokens=_ints(prompt_tokens),
        completions=[_completion(sample) for sample in samples],
    )


def _completion(sample: Completion | None) -> rollout_pb2.PartialCompletion:
    if sample is None:
        return rollout_pb2.PartialCompletion()
    return rollout_pb2.PartialCompletion(
        tokens=_ints(sample.tokens),
        logprobs=np.ascontiguousarray(sample.logprobs, dtype="<f4").tobytes(),
        versions=[
            common_pb2.VersionSpan(version=version, length=length)
            for version, length in sample.versions
        ],
        finish_reason=_FINISH[sample.finish],
        stop=sample.stop or "",
    )


def prefixes_of(
    partial: rollout_pb2.PartialGroup,
    prompt_tokens: NDArray[np.int32],
    *,
    count: int,
    max_tokens: int,
    version: int,
) -> tuple[Completion | None, ...]:
    """For each of ``count`` samples what there is of it; empty where there is nothing at all.

    ``version``: what the engine serves.
    """
    if len(partial.completions) != count or partial.prompt_tokens != _ints(prompt_tokens):
        return ()
    samples = tuple(_sample(c, max_tokens, version) for c in partial.completions)
    return samples if any(samples) else ()


def _sample(
    completion: rollout_pb2.PartialCompletion, max_tokens: int, version: int
) -> Completion | None:
    finish = _ENDS[completion.finish_reason]
    spans = [(span.version, span.length) for span in completion.versions]
    count = sum(length for _, length in spans)
    if finish is Finish.PARTIAL:
        spans = [(v, length) for v, length in spans if v <= version]
        count = sum(length for _, length in spans)
        if count >= max_tokens:
            finish = Finish.LENGTH
    if not count:
        return None
    return Completion(
        np.frombuffer(completion.tokens, dtype="<i4")[:count].astype(np.int32),
        np.frombuffer(completion.logprobs, dtype="<f4")[:count].astype(np.float32),
        tuple(spans),
        finish,
        completion.stop or None,
    )


def _ints(tokens: NDArray[np.int32]) -> bytes:
    return np.ascontiguousarray(tokens, dtype="<i4").tobytes()
