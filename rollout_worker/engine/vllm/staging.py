"""Staging of new weights on every rank while the engine runs.

stage ──► paceline_stage on each rank (returns at once) ──► a line from each, through a pipe ──►
done
"""

from __future__ import annotations

import asyncio
import json
import os

from rollout_worker.engine.base import SwapFailed
from rollout_worker.engine.vllm.client import VLLMClient
from rollout_worker.engine.vllm.shared_weights import SharedWeights

_STAGE_S = 600.0
"""Longest wait for the ranks. Seconds."""


async def stage(client: VLLMClient, weights: SharedWeights) -> None:
    """Returns once every rank has staged the weights. Raises SwapFailed, and then no rank keeps
    them; EngineError if the engine has ended."""
    loop = asyncio.get_running_loop()
    missing, errors = set(range(client.spec.ranks)), list[str]()
    done: asyncio.Future[None] = loop.create_future()
    # It has no name in any file system: ranks open it by this process's descriptor.
    answers, write_end = os.pipe2(os.O_CLOEXEC)

    def read_answers() -> None:
        # Lines are whole: a rank writes its line at once, and it is short.
        for line in os.read(answers, 1 << 16).splitlines():
            answer = json.loads(line)
            missing.discard(answer["rank"])
            if answer["error"]:
                errors.append(f"rank {answer['rank']}: {answer['error']}")
        if not missing and not done.done():
            done.set_result(None)

    loop.add_reader(answers, read_answers)
    pipe = f"/proc/{os.getpid()}/fd/{write_end}", os.fstat(write_end).st_ino
    try:
        await client.ranks("paceline_stage", weights.key, weights.description, *pipe)
        async with asyncio.timeout(_STAGE_S):
            await client.unless_dead(done)
    except TimeoutError:
        errors.append(f"ranks {sorted(missing)} did not answer")
    finally:
        loop.remove_reader(answers)
        os.close(write_end)
        os.close(answers)
    if errors:
        await client.ranks("paceline_drop", weights.key)
        raise SwapFailed(f"weights {weights.version} not staged: {errors[0]}")
