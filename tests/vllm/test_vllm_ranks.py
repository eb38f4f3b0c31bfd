"""Several ranks in one engine: all of a swap or none, and no process that outlives its owner."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch

from rollout_worker.engine.base import Engine, Request, SamplingParams, WeightsRefused
from tests.helpers.engines import Reference, make_test_engine, needs_vllm, tiny_config
from tests.helpers.tiny_model import make_tiny_model
from tests.helpers.vllm_faults import EXTENSION, FAULT

pytestmark = needs_vllm
in_one_loop = pytest.mark.asyncio(loop_scope="module")

PROMPT = [13, 5, 8, 3, 14]


@dataclass
class Faulty:
    engine: Engine
    fault: Path
    models: tuple[Reference, Reference]

    async def load(self, model: Reference) -> None:
        weights = dict(model.model.named_parameters())
        await self.engine.load_weights(self.engine.version + 1, weights)

    async def serves(self, model: Reference) -> bool:
        request = Request(
            "g", np.array(PROMPT, dtype=np.int32), SamplingParams(24, greedy=True), count=1
        )
        (sample,) = await self.engine.generate(request)
        expected = model.logprobs(PROMPT, sample)
        return bool(np.allclose(sample.logprobs, expected, atol=1e-4))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def faulty(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Faulty]:
    torch.set_num_threads(1)
    base = tmp_path_factory.mktemp("ranks")
    # A vocabulary of 15: padded, and the padding lies on the second rank.
    first = make_tiny_model(base / "a", hidden=128)
    second = make_tiny_model(base / "b", hidden=128, seed=7)
    fault = base / "fault"
    fault.write_text("")
    config = tiny_config(first, slots=8, engine="vllm", tensor_parallel=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FAULT, str(fault))
        engine = make_test_engine("vllm", config, worker_extension_cls=EXTENSION)
        await engine.start()
    yield Faulty(engine, fault, (Reference(first), Reference(second)))
    await engine.close()


@in_one_loop
async def test_wrong_parameters_are_noticed_at_the_first_sync(faulty: Faulty) -> None:
    faulty.fault.write_text("a wrong last layer")
    with pytest.raises(WeightsRefused, match="differ"):
        await faulty.load(faulty.models[0])
    assert faulty.engine.version == -1
    faulty.fault.write_text("")


@in_one_loop
async def test_fused_tied_and_padded_parameters_arrive_on_every_rank(faulty: Faulty) -> None:
    for model in faulty.models[1], faulty.models[0]:
        await faulty.load(model)
        assert await faulty.serves(model)


@in_one_loop
async def test_a_swap_that_fails_on_one_rank_happens_on_none(faulty: Faulty) -> None:
    await faulty.load(faulty.models[0])
    version = faulty.engine.version
    faulty.fault.write_text("half a swap on rank 1")
    with pytest.raises(WeightsRefused, match="rank 1"):
        await faulty.load(faulty.models[1])
    assert faulty.engine.version == version
    assert await faulty.serves(faulty.models[0])
    await faulty.load(faulty.models[1])
    assert await faulty.serves(faulty.models[1])


def test_no_process_outlives_a_killed_owner(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", hidden=128)
    owner = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.vllm_process", str(model)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
    )
    assert owner.stdout is not None
    line = next(line for line in owner.stdout if line.startswith("["))
    children = [psutil.Process(pid) for pid in json.loads(line)]
    # The engine's process, two ranks, and perhaps Python's resource tracker.
    assert len(children) >= 3
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
