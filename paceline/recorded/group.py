"""Groups of recorded rows, as a rollout worker submits them."""

from __future__ import annotations

import numpy as np

from paceline.recorded.encoding import RecordedCompletion, RecordedRow
from paceline.v1 import common_pb2, rollout_pb2

VERSION = 0
"""Of every recorded token: no weights sampled it, and it has no age."""
_MAX_TEXT = 1 << 16
"""Characters of a text that are sent along; texts are for people."""


def recorded_group(
    task: common_pb2.TaskRef, kind: rollout_pb2.TaskKind, row: RecordedRow
) -> rollout_pb2.Group:
    """The group of ``row``. Its behaviour log-probs are 0, and nothing reads them."""
    return rollout_pb2.Group(
        task=task,
        kind=kind,
        prompt_tokens=row.prompt.tokens.astype("<i4").tobytes(),
        completions=[_completion(completion) for completion in row.completions],
        prompt_text=row.prompt.text[:_MAX_TEXT],
    )


def _completion(completion: RecordedCompletion) -> rollout_pb2.Completion:
    count = len(completion.tokens)
    return rollout_pb2.Completion(
        tokens=completion.tokens.astype("<i4").tobytes(),
        logprobs=np.zeros(count, dtype="<f4").tobytes(),
        versions=[common_pb2.VersionSpan(version=VERSION, length=count)],
        finish_reason=rollout_pb2.FINISH_REASON_STOP,
        reward=completion.reward,
        loss_mask=b"" if completion.trained.all() else completion.trained.tobytes(),
        text=completion.text[:_MAX_TEXT],
    )
