"""A rollout worker whose engine halts for ever at a token, for tests that kill it there.

``python -m tests.fakes.failpoint_rollout CONFIG CONTROLLER TOKENS`` prints ``{"tokens": n}`` when
the engine halts: the most tokens of one of its sequences. The rest of the process goes on. The
engine is the config's, because tests compare its tokens with an undisturbed run: the transformers
engine halts at exactly that token, vLLM is stopped as soon as it has that many.
"""

import asyncio
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from paceline.config.load import load_config
from paceline.v1 import worker_pb2
from paceline.weights.weight_transfer import StagedWeights
from rollout_worker.engine.transformers.engine import TransformersEngine
from rollout_worker.engine.vllm import internals
from rollout_worker.main import RolloutWorker
from testbed.fleets.controllers import until


class HaltingEngine(TransformersEngine):
    """Its sequences must run in step."""

    halt_at = 0

    def _turn(self) -> bool:
        running = self._scheduler.batch.size
        tokens = self._scheduler.tokens // running if running else 0
        if tokens >= self.halt_at:
            print(json.dumps({"tokens": tokens}), flush=True)
            threading.Event().wait()
        return super()._turn()


async def main(config_path: str, address: str, tokens: str) -> None:
    config = load_config(Path(config_path), [])
    worker = RolloutWorker(config, [address], "rollout-0", "127.0.0.1")
    if config.rollout.engine == "transformers":
        worker.engine = engine = HaltingEngine(config, worker.tokenizer)
        engine.halt_at = int(tokens)
    running = asyncio.create_task(worker.run())
    await until(lambda: worker.lifecycle.state == worker_pb2.LIFECYCLE_RUNNING, 120.0)
    model = AutoModelForCausalLM.from_pretrained(config.model.path)
    await worker.loading.load(StagedWeights(0, dict(model.named_parameters())))
    if config.rollout.engine == "vllm":
        await stop_vllm(worker.engine._client.llm, int(tokens))
    await running


async def stop_vllm(llm: Any, tokens: int) -> None:
    def most() -> int:
        return max(map(internals.tokens_so_far, internals.states(llm)), default=0)

    while most() < tokens:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    for process in llm.engine_core.resources.engine_manager.processes:
        os.kill(process.pid, signal.SIGSTOP)
    # Outputs that were sent before the stop are still read.
    seen = -1
    while seen != most():
        seen = most()
        await asyncio.sleep(0.2)
    print(json.dumps({"tokens": seen}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main(*sys.argv[1:]))
