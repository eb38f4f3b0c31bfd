"""Protobuf messages of unfinished completions, and the prefixes that the next attempt gets of them.

- Tokens, log-probs and versions stay as they were. The next attempt's random numbers are those of
  the same seed, completion and position (see Engine.exact_continuation).
- A prefix is used only after the prompt that it continues, and only up to the version that the
  engine serves: within a completion versions never fall.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.v1 import common_pb2, rollout_pb2
from rollout_worker.engine.base import Completion, Finish
from rollout_worker.tasks.group_encoding import FINISH, completion_fields, token_bytes

_FINISH_OF = {reason: finish for finish, reason in FINISH.items()}


def partial_group(
    task: common_pb2.TaskRef,
    prompt_tokens: NDArray[np.int32],
    completions: Sequence[Completion | None],
) -> rollout_pb2.PartialGroup:
    """``completions``: one for each of the group; None: no token of it yet."""
    return rollout_pb2.PartialGroup(
        task=task,
        prompt_tokens=token_bytes(prompt_tokens),
        completions=[
            rollout_pb2.PartialCompletion()
            if completion is None
            else rollout_pb2.PartialCompletion(
                **completion_fields(completion), stop=completion.stop or ""
            )
            for completion in completions
        ],
    )


def prefixes_of(
    partial: rollout_pb2.PartialGroup,
    prompt_tokens: NDArray[np.int32],
    *,
    count: int,
    max_tokens: int,
    version: int,
) -> tuple[Completion | None, ...]:
    """The prefix of each of ``count`` completions; empty if there is none at all.

    ``version``: that the engine serves.
    """
    if len(partial.completions) != count or partial.prompt_tokens != token_bytes(prompt_tokens):
        return ()
    prefixes = tuple(_prefix(c, max_tokens, version) for c in partial.completions)
    return prefixes if any(prefixes) else ()


def _prefix(
    completion: rollout_pb2.PartialCompletion, max_tokens: int, version: int
) -> Completion | None:
    finish = _FINISH_OF[completion.finish_reason]
    spans = [(span.version, span.length) for span in completion.versions]
    if finish is Finish.PARTIAL:
        spans = [(v, length) for v, length in spans if v <= version]
    count = sum(length for _, length in spans)
    if not count:
        return None
    if finish is Finish.PARTIAL and count >= max_tokens:
        finish = Finish.LENGTH
    return Completion(
        np.frombuffer(completion.tokens, dtype="<i4")[:count].astype(np.int32),
        np.frombuffer(completion.logprobs, dtype="<f4")[:count].astype(np.float32),
        tuple(spans),
        finish,
        completion.stop or None,
    )
