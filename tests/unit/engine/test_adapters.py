"""Engines of a run that trains adapters: nothing before the first ones, then exactly theirs."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.config.schema import Config
from paceline.config.sections.inputs import LoraConfig
from paceline.lora import adapter_shapes, merge_into
from rollout_worker.engine.base import (
    Completion,
    EngineError,
    ParametersDiffer,
    Request,
    SamplingParams,
    WeightMismatch,
)
from rollout_worker.engine.model import trial
from rollout_worker.engine.transformers import engine as transformers_engine
from rollout_worker.engine.transformers.fused_decoder import FusedDecoder
from testbed.tiny_model import make_tiny_model
from tests.fakes import vllm_faults
from tests.fixtures.engines import Reference, make_test_engine, needs_vllm, tiny_config

PROMPT = [13, 5, 8, 3, 14]
LORA = LoraConfig(rank=4, alpha=6.0, targets=["q_proj", "v_proj", "o_proj", "mlp.*"])
"""Of fused layers some parts, and some whole."""
SHAPE = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "eos_token_id"),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    return make_tiny_model(tmp_path / "model", hidden=128)


def config_of(path: Path, **rollout: Any) -> Config:
    config = tiny_config(path, max_tokens=400, **rollout)
    return config.model_copy(update={"model": config.model.model_copy(update={"lora": LORA})})


def adapters(path: Path, seed: int) -> dict[str, Tensor]:
    """As after some steps."""
    shapes = adapter_shapes(Reference(path).model.config, LORA)
    drawn = trial({name: torch.zeros(shape) for name, shape in shapes.items()}, LORA)
    return {name: tensor * (1 + seed / 2) for name, tensor in drawn.items()}


def test_a_trial_tells_each_adapter_from_every_other(path: Path) -> None:
    drawn = adapters(path, 0)
    assert all(tensor.std() > 0.01 for tensor in drawn.values())
    for shape in {tensor.shape for tensor in drawn.values()}:
        alike = [tensor for tensor in drawn.values() if tensor.shape == shape]
        assert len({tuple(tensor.flatten().tolist()) for tensor in alike}) == len(alike)


def merged(path: Path, tensors: Mapping[str, Tensor]) -> Reference:
    reference = Reference(path)
    merge_into(reference.model, tensors, LORA)
    return reference


def ask(name: str, tokens: int = 24, count: int = 2) -> Request:
    return Request(name, np.array(PROMPT, np.int32), SamplingParams(tokens), count)


def assert_logprobs(model: Reference, sample: Completion) -> None:
    np.testing.assert_allclose(sample.logprobs, model.logprobs(PROMPT, sample), atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("fused", 1),
        ("general", 1),
        # In every run vLLM with two ranks, and with one below.
        pytest.param("vllm", 1, marks=[needs_vllm, pytest.mark.slow]),
        pytest.param("vllm", 2, marks=[needs_vllm, pytest.mark.long]),
    ],
)
async def test_log_probs_are_those_of_the_merged_model_before_and_after_a_swap(
    kind: str, ranks: int, path: Path
) -> None:
    versions = [adapters(path, seed) for seed in (0, 1)]
    models = [merged(path, tensors) for tensors in versions]
    engine: Any = make_test_engine(kind, config_of(path, tensor_parallel=ranks))
    await engine.start()
    try:
        assert engine.version == -1
        assert kind != "fused" or isinstance(engine._decoder, FusedDecoder)
        with pytest.raises((EngineError, TimeoutError)):
            await asyncio.wait_for(engine.generate(ask("early")), 0.2)
        assert engine.stats().tokens == 0
        await engine.load_weights(0, versions[0])
        for sample in await engine.generate(ask("first")):
            assert_logprobs(models[0], sample)
        running = asyncio.create_task(engine.generate(ask("across", 380)))
        before = engine.stats().tokens
        while engine.stats().tokens < before + 8:
            assert not running.done()
            await asyncio.sleep(0.001)
        await engine.load_weights(1, versions[1])
        assert any(len(sample.versions) == 2 for sample in await running)
        # The prefix of the prompt, too, is the new version's.
        for sample in await engine.generate(ask("second")):
            assert_logprobs(models[1], sample)
            assert {version for version, _ in sample.versions} == {1}
    finally:
        await engine.close()


@pytest.mark.parametrize("kind", ["fused", "general"])
async def test_an_adapter_that_a_swap_left_out_is_noticed(
    kind: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = transformers_engine.copy_parts
    monkeypatch.setattr(transformers_engine, "copy_parts", lambda parts: copy(parts[1:]))
    engine = make_test_engine(kind, config_of(path))
    await engine.start()
    try:
        name = next(iter(tensors := adapters(path, 1)))
        with pytest.raises(ParametersDiffer, match=name):
            await engine.load_weights(0, tensors)
        assert engine.version == -1
    finally:
        await engine.close()


@needs_vllm
async def test_adapters_that_never_arrive_in_vllm_are_noticed_at_the_first_sync(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM itself says nothing of a name that it has no place for. verl served the base alone for
    two months (its issue 7495)."""
    fault = tmp_path / "fault"
    monkeypatch.setenv(vllm_faults.FAULT, str(fault))
    monkeypatch.setattr("rollout_worker.engine.vllm.client.EXTENSION", vllm_faults.EXTENSION)
    # As they are when a run begins: they add nothing.
    drawn = adapters(path, 0)
    tensors = {n: t * 0 if ".lora_B." in n else t for n, t in drawn.items()}
    engine: Any = make_test_engine("vllm", config_of(path))
    await engine.start()
    try:
        names = "lm_head.lora_A.weight", "model.layers.0.mlp.up_proj.lora_B.weight"
        assert await engine._client.ranks("paceline_without_slot", [*names]) == [["lm_head"]]
        for kind in "renamed", "left out: layers.1.self_attn.v_proj", "scaled twice":
            fault.write_text(kind)
            with pytest.raises(ParametersDiffer, match="the parameters differ in"):
                await engine.load_weights(0, tensors)
            assert engine.version == -1
        fault.write_text("")
        # They are in their slots, and no request asks for them.
        adapter, engine._requests._adapter = engine._requests._adapter, None
        with pytest.raises(WeightMismatch, match="log-probs differ"):
            await engine.load_weights(0, tensors)
        assert engine.version == -1
        engine._requests._adapter = adapter
        await engine.load_weights(0, tensors)
        for sample in await engine.generate(ask("at last")):
            assert_logprobs(Reference(path), sample)
    finally:
        await engine.close()


@needs_vllm
@pytest.mark.parametrize(
    ("model", "given", "why"),
    [
        ({}, {"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({}, {"enable_lora": False}, "enable_lora is false"),
        ({}, {}, ""),
        ({"rank": 513}, {}, "rank is 513, and vLLM takes at most 512"),
        ({"architectures": ["StableLmForCausalLM"]}, {}, "vLLM has none for"),
    ],
)
def test_what_vllm_has_no_slots_for_is_known_before_the_start(
    model: dict[str, Any], given: dict[str, Any], why: str
) -> None:
    from rollout_worker.engine.vllm.adapters import obstacle

    matrices = {"a.lora_A.weight": torch.zeros(model.get("rank", 4), 1)}
    said = obstacle(matrices, given, model.get("architectures", ["Qwen3ForCausalLM"]))
    assert why in said and bool(why) == bool(said)


@needs_vllm
async def test_adapters_without_slots_in_vllm_are_merged_into_the_base_and_do_not_drift(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM has no adapters for this model. The faults: adapters that the merge forgets; merged
    weights that one layer does not get."""
    fault = tmp_path / "fault"
    fault.write_text("")
    monkeypatch.setenv(vllm_faults.FAULT, str(fault))
    monkeypatch.setattr("rollout_worker.engine.vllm.client.EXTENSION", vllm_faults.EXTENSION)
    given = AutoConfig.from_pretrained(path).to_dict()
    config = AutoConfig.for_model("stablelm", **{name: given[name] for name in SHAPE})
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    first, other = adapters(path, 0), adapters(path, 1)
    new = {n: t * 0 if ".lora_B." in n else t for n, t in first.items()}
    engine: Any = make_test_engine("vllm", config_of(path))
    await engine.start()
    try:
        with monkeypatch.context() as forgetful:
            forgetful.setattr("rollout_worker.engine.vllm.engine.merged", lambda *_: ())
            with pytest.raises(WeightMismatch, match="log-probs differ"):
                await engine.load_weights(0, new)
        assert engine.version == -1
        await engine.load_weights(0, new)
        fault.write_text("left out: model.layers.1.mlp.up_proj.weight")
        with pytest.raises(ParametersDiffer, match=r"layers\.1\.mlp\.up_proj"):
            await engine.load_weights(1, first)
        assert engine.version == -1
        fault.write_text("")
        sums = []
        for version, tensors in enumerate((new, first, other, first)):
            await engine.load_weights(version, tensors)
            for sample in await engine.generate(ask(f"version {version}")):
                assert_logprobs(merged(path, tensors), sample)
            sums.append(json.loads(engine._served.description)["checksum"])
        assert len(set(sums)) == 3 and sums[1] == sums[3]
    finally:
        await engine.close()


@needs_vllm
async def test_a_layer_without_a_slot_is_found_at_the_start(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = tmp_path / "fault"
    fault.write_text("no slot")
    monkeypatch.setenv(vllm_faults.FAULT, str(fault))
    monkeypatch.setattr("rollout_worker.engine.vllm.client.EXTENSION", vllm_faults.EXTENSION)
    engine: Any = make_test_engine("vllm", config_of(path))
    await engine.start()
    try:
        tensors = adapters(path, 0)
        await engine.load_weights(0, tensors)
        for sample in await engine.generate(ask("merged")):
            assert_logprobs(merged(path, tensors), sample)
        assert not engine._client.spec.slots
    finally:
        await engine.close()
