"""Reports of partial work, for tests of who keeps and gets them."""

from __future__ import annotations

import numpy as np

from benchmarks.load import FakeRollout
from paceline.v1 import common_pb2, rollout_pb2


def partial(
    task_id: str = "t0", attempt: int = 1, tokens: int = 3, version: int = 0, size: int = 4
) -> rollout_pb2.PartialGroup:
    """``size`` samples of ``tokens`` tokens each, the last of which has none yet."""
    ids = np.arange(3, 3 + tokens, dtype="<i4").tobytes()
    begun = rollout_pb2.PartialCompletion(
        tokens=ids,
        logprobs=np.full(tokens, -0.5, "<f4").tobytes(),
        versions=[common_pb2.VersionSpan(version=version, length=tokens)],
    )
    return rollout_pb2.PartialGroup(
        task=common_pb2.TaskRef(task_id=task_id, attempt=attempt),
        prompt_tokens=ids,
        completions=[*[begun] * (size - 1), rollout_pb2.PartialCompletion()],
    )


async def report(
    worker: FakeRollout, *groups: rollout_pb2.PartialGroup
) -> list[rollout_pb2.SubmitResult]:
    request = rollout_pb2.PartialRequest(caller=worker.session.caller, groups=groups)
    reply = await worker.control.call("RolloutService.ReportPartials", request)
    return list(reply.results)
