"""Several ranks in one engine: all of a swap or none."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from string import ascii_letters
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from rollout_worker.engine.base import (
    Aborted,
    Engine,
    EngineError,
    ParametersDiffer,
    Request,
    SamplingParams,
    SwapFailed,
    WeightMismatch,
)
from rollout_worker.engine.vllm import client
from testbed.tiny_model import make_tiny_model
from tests.fakes.vllm_faults import EXTENSION, FAULT
from tests.fixtures.engines import Reference, make_test_engine, needs_vllm, tiny_config

pytestmark = [pytest.mark.long, needs_vllm]
in_one_loop = pytest.mark.asyncio(loop_scope="module")

UNPACKED = "tests.fakes.vllm_unpacked.UnpackedRank"
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
        patch.setattr(client, "EXTENSION", EXTENSION)
        engine = make_test_engine("vllm", config)
        await engine.start()
    yield Faulty(engine, fault, (Reference(first), Reference(second)))
    await engine.close()


@in_one_loop
async def test_wrong_parameters_are_noticed_at_the_first_sync(faulty: Faulty) -> None:
    faulty.fault.write_text("a wrong last layer")
    with pytest.raises(ParametersDiffer, match=r"parameters differ in .*norm"):
        await faulty.load(faulty.models[0])
    assert faulty.engine.version == -1
    faulty.fault.write_text("kernels that compute something else")
    with pytest.raises(WeightMismatch, match=r"log-probs differ.*nothing of model\.norm"):
        await faulty.load(faulty.models[0])
    assert faulty.engine.version == -1
    faulty.fault.write_text("")


@in_one_loop
async def test_a_swap_that_fails_on_one_rank_happens_on_none(faulty: Faulty) -> None:
    await faulty.load(faulty.models[0])
    version = faulty.engine.version
    faulty.fault.write_text("half a swap on rank 1")
    with pytest.raises(SwapFailed, match="rank 1"):
        await faulty.load(faulty.models[1])
    assert faulty.engine.version == version
    assert await faulty.serves(faulty.models[0])
    await faulty.load(faulty.models[1])
    assert await faulty.serves(faulty.models[1])


@in_one_loop
async def test_no_token_is_generated_after_a_swap_that_left_out_a_tensor_on_one_rank(
    faulty: Faulty,
) -> None:
    """The key projection, a part of a fused parameter: vLLM itself notices nothing."""
    await faulty.load(faulty.models[0])
    params = SamplingParams(80, greedy=True)
    long = Request("long", np.array(PROMPT, dtype=np.int32), params, count=2)
    running = asyncio.create_task(faulty.engine.generate(long))
    while not faulty.engine.stats().running:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    version = faulty.engine.version
    name = "model.layers.0.self_attn.k_proj.weight"
    faulty.fault.write_text(f"left out: {name}")
    weights = dict(faulty.models[1].model.named_parameters())
    with pytest.raises(ParametersDiffer, match=name):
        await faulty.engine.load_weights(version + 1, weights)
    assert faulty.engine.version == -1
    with pytest.raises(Aborted) as aborted:
        await running
    assert {v for c in aborted.value.partial if c for v, _ in c.versions} <= {version}
    with pytest.raises(Aborted):
        await faulty.engine.generate(long)
    faulty.fault.write_text("")
    await faulty.engine.load_weights(version + 1, weights)
    assert faulty.engine.version == version + 1
    assert await faulty.serves(faulty.models[1])


@in_one_loop
async def test_an_engine_that_dies_while_idle_or_staging_says_so(
    faulty: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test of its engine."""
    # Ranks that never answer: only the death ends the wait.
    faulty.fault.write_text("never staged")
    client = faulty.engine._client
    asked = asyncio.Event()
    ranks = client.ranks

    async def noted(method: str, *arguments: Any) -> list[Any]:
        answers = await ranks(method, *arguments)
        asked.set()
        return answers

    monkeypatch.setattr(client, "ranks", noted)
    loading = asyncio.create_task(faulty.load(faulty.models[0]))
    told = asyncio.create_task(faulty.engine.until_failure())
    await asyncio.wait_for(asked.wait(), 30)
    assert not told.done() and not loading.done()
    for process in client.llm.engine_core.resources.engine_manager.processes:
        process.kill()
    for waiting in told, loading:
        with pytest.raises(EngineError, match="engine process ended"):
            await asyncio.wait_for(waiting, 60)


async def test_where_loading_is_copying_a_swap_is_those_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = tmp_path / "fault"
    fault.write_text("")
    monkeypatch.setenv(FAULT, str(fault))
    monkeypatch.setattr(client, "EXTENSION", UNPACKED)
    models = [
        make_tiny_model(tmp_path / str(seed), ascii_letters, hidden=128, seed=seed)
        for seed in range(3)
    ]
    config = tiny_config(models[0], slots=8, engine="vllm", tensor_parallel=2)
    engine = make_test_engine("vllm", config)
    await engine.start()
    try:
        scene = Faulty(engine, tmp_path, (Reference(models[0]), Reference(models[1])))
        await scene.load(Reference(models[2]))
        assert await engine._client.ranks("paceline_planned") == [True, True]
        assert await engine._client.ranks("paceline_staged_slices") == [[0, 0], [0, 0]]
        for model in scene.models:
            await scene.load(model)
            assert await scene.serves(model)
            slices = await engine._client.ranks("paceline_staged_slices")
            assert all(staged < 0.55 * whole for staged, whole in slices)
            assert sum(staged for staged, _ in slices) >= slices[0][1], "all of it on some rank"
        fault.write_text("model.layers.1.mlp.up_proj.weight")
        with pytest.raises(
            ParametersDiffer, match=r"differ in model\.layers\.1\.mlp\.up_proj\.weight$"
        ):
            await scene.load(scene.models[0])
        assert engine.version == -1
        fault.write_text("")
        await engine.load_weights(9, dict(scene.models[0].model.named_parameters()))
        assert await scene.serves(scene.models[0])
    finally:
        await engine.close()


needs_amx = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="this processor has no AMX: vLLM needs it"
)


@needs_amx
async def test_a_quantised_engine_holds_what_was_sent_quantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = tmp_path / "fault"
    fault.write_text("")
    monkeypatch.setenv(FAULT, str(fault))
    monkeypatch.setattr(client, "EXTENSION", EXTENSION)
    models = [make_tiny_model(tmp_path / str(s), hidden=128, seed=s) for s in range(2)]
    options = {"vllm": {"quantization": "fp8_per_block"}, "dtype": "bfloat16"}
    engine = make_test_engine("vllm", tiny_config(models[0], slots=8, engine="vllm", **options))
    await engine.start()
    try:
        scene = Faulty(engine, fault, (Reference(models[0]), Reference(models[1])))
        for model in (*scene.models, scene.models[0]):
            await scene.load(model)
        for what, named in (
            ("left out: model.layers.0.self_attn.k_proj.weight", "k_proj"),
            ("held back: model.layers.1.mlp.down_proj", "down_proj"),
        ):
            fault.write_text(what)
            with pytest.raises(ParametersDiffer, match=rf"differ in .*{named}\.weight"):
                await scene.load(scene.models[1])
            fault.write_text("")
            await engine.load_weights(
                engine.version + 9, dict(scene.models[0].model.named_parameters())
            )
    finally:
        await engine.close()
