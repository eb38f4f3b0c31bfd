"""What vLLM promises beyond the suite that every engine passes."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from paceline.prompt_tokenizer import PromptTokenizer
from rollout_worker.engine.base import (
    Aborted,
    Completion,
    Engine,
    EngineError,
    GenerationFailed,
    Request,
    SamplingParams,
    SwapFailed,
)
from rollout_worker.engine.choice import make_engine
from rollout_worker.engine.vllm import engine as vllm_engine
from rollout_worker.engine.vllm import readback
from rollout_worker.engine.vllm.rank_weights import SharedWeights, share
from testbed.tiny_model import make_tiny_model
from tests.fixtures.engines import Reference, make_test_engine, needs_vllm, tiny_config

pytestmark = [needs_vllm, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [13, *(3 + i * 7 % 10 for i in range(99)), 14]
"""Longer than three blocks of the cache."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    base = tmp_path_factory.mktemp("models")
    return (
        make_tiny_model(base / "a", hidden=128),
        make_tiny_model(base / "b", hidden=128, seed=7),
    )


@pytest.fixture(scope="module")
def models(paths: tuple[Path, Path]) -> tuple[Reference, Reference]:
    torch.set_num_threads(1)
    return Reference(paths[0]), Reference(paths[1])


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def started(paths: tuple[Path, Path]) -> AsyncIterator[Engine]:
    config = tiny_config(paths[0], max_tokens=400, engine="vllm", vllm={"block_size": 32})
    engine = make_engine(config, PromptTokenizer(config))
    await engine.start()
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(started: Engine, models: tuple[Reference, Reference]) -> Engine:
    started.on_update = "keep"
    await load(started, models[0])
    return started


async def load(engine: Engine, model: Reference) -> float:
    return await engine.load_weights(engine.version + 1, dict(model.model.named_parameters()))


async def until(work: asyncio.Task[object], condition: Callable[[], bool]) -> None:
    """``condition`` is true, while ``work`` is not done."""
    while not condition():
        assert not work.done()
        await asyncio.sleep(0.001)


def ask(name: str, prompt: list[int] = PROMPT, count: int = 1, **params) -> Request:
    params.setdefault("max_tokens", 16)
    return Request(name, np.array(prompt, dtype=np.int32), SamplingParams(**params), count)


def assert_logprobs(model: Reference, sample: Completion, since: int = 0) -> None:
    expected = model.logprobs(PROMPT, sample)
    np.testing.assert_allclose(sample.logprobs[since:], expected[since:], atol=1e-4)


async def test_nobody_may_ask_for_tokens_until_the_first_weights_are_verified(
    started: Engine, models: tuple[Reference, Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first test of its engine, which starts with random weights."""
    assert started.version == -1
    with pytest.raises(EngineError, match="no weights yet"):
        await started.generate(ask("early"))
    comparing, compared = threading.Event(), threading.Event()
    plain = readback.mean_gap

    def held(*arguments: Any) -> Any:
        comparing.set()
        assert compared.wait(60)
        return plain(*arguments)

    monkeypatch.setattr(readback, "mean_gap", held)
    loading = asyncio.create_task(load(started, models[0]))
    try:
        await until(loading, comparing.is_set)
        # What a worker leases by: it would be given tasks that it cannot start.
        assert started.version == -1
        with pytest.raises(EngineError, match="no weights yet"):
            await started.generate(ask("early"))
    finally:
        compared.set()
    await loading
    assert started.version == 0
    assert len(await started.generate(ask("now", count=2))) == 2


async def test_more_prompts_than_a_step_takes(
    engine: Engine, models: tuple[Reference, Reference]
) -> None:
    """vLLM 0.32 on a CPU dies of a seeded request whose prompt is cut in two."""
    prompts = [[13, *(3 + (i * k + k // 10) % 10 for i in range(99)), 14] for k in range(1, 64)]
    groups = await asyncio.gather(
        *(engine.generate(ask(f"p{i}", p, seed=i)) for i, p in enumerate(prompts))
    )
    for prompt, (sample,) in list(zip(prompts, groups, strict=True))[::20]:
        expected = models[0].logprobs(prompt, sample)
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("on_update", ["keep", "drain"])
async def test_what_waits_during_a_swap_starts_under_the_new_version(
    engine: Engine,
    models: tuple[Reference, Reference],
    monkeypatch: pytest.MonkeyPatch,
    on_update: str,
) -> None:
    """More sequences than fit: those that wait must not take up the old version's prefix, even
    where vLLM could not empty its cache."""

    async def not_emptied(reset_running_requests: bool) -> bool:
        return False

    monkeypatch.setattr(engine._client.llm, "reset_prefix_cache", not_emptied)
    engine.on_update = on_update
    # So many that the last ones still wait when the swap begins, however late this process is.
    waiting = asyncio.create_task(engine.generate(ask("many", count=800, max_tokens=24)))
    await until(waiting, lambda: engine.stats().waiting >= 400)
    await load(engine, models[1])
    samples = await waiting
    fresh = [s for s in samples if s.versions[0][0] == engine.version]
    # Some of those that waited may have begun before the swap did.
    assert len(fresh) >= 10
    for sample in fresh[:5] + fresh[-5:]:
        assert_logprobs(models[1], sample)


async def test_recompute_gives_later_tokens_the_new_weights_only(
    engine: Engine, models: tuple[Reference, Reference]
) -> None:
    engine.on_update = "recompute"
    samples = await _across_a_swap(engine, models[1])
    mixed = [s for s in samples if len(s.versions) == 2]
    assert mixed
    for sample in mixed:
        assert_logprobs(models[1], sample, since=sample.versions[0][1])


async def test_drain_lets_nobody_see_two_versions(
    engine: Engine, models: tuple[Reference, Reference]
) -> None:
    engine.on_update = "drain"
    samples = await _across_a_swap(engine, models[1])
    assert all(len(s.versions) == 1 for s in samples)
    assert {s.versions[0][0] for s in samples} == {engine.version - 1}
    for sample in samples[:4]:
        assert_logprobs(models[0], sample)


async def _across_a_swap(engine: Engine, model: Reference) -> tuple[Completion, ...]:
    before = engine.stats().tokens
    running = asyncio.create_task(engine.generate(ask("run", count=40, max_tokens=200, seed=3)))
    await until(running, lambda: engine.stats().tokens >= before + 80)
    await load(engine, model)
    return await running


async def test_damaged_weights_leave_the_old_version_serving(
    engine: Engine, models: tuple[Reference, Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = engine.version

    def damaged(*arguments) -> SharedWeights:
        segment = share(*arguments)
        described = json.loads(segment.description) | {"checksum": "0" * 32}
        return replace(segment, description=json.dumps(described))

    monkeypatch.setattr(vllm_engine, "share", damaged)
    with pytest.raises(SwapFailed, match="checksum"):
        await load(engine, models[1])
    assert engine.version == version
    (sample,) = await engine.generate(ask("after"))
    assert_logprobs(models[0], sample)
    assert sample.versions == ((version, len(sample.tokens)),)


async def test_generation_goes_on_while_weights_are_staged(
    engine: Engine, models: tuple[Reference, Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, written = threading.Event(), threading.Event()

    def held(*arguments: Any) -> SharedWeights:
        writing.set()
        assert written.wait(60)
        return share(*arguments)

    monkeypatch.setattr(vllm_engine, "share", held)
    paused = engine.stats().swap_s
    running = asyncio.create_task(engine.generate(ask("run", count=64, max_tokens=300, seed=3)))
    loading = asyncio.create_task(load(engine, models[0]))
    try:
        await until(loading, writing.is_set)
        tokens = engine.stats().tokens
        await until(loading, lambda: engine.stats().tokens > tokens + 200)
        assert engine.stats().swap_s == paused
    finally:
        written.set()
    pause = await loading
    await running
    assert engine.stats().swap_s == pytest.approx(paused + pause)


async def test_the_same_version_with_other_weights_replaces_all_that_the_first_left(
    engine: Engine, models: tuple[Reference, Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A publisher dies before its step is committed; the next one trains that step anew."""
    version = engine.version
    await engine.generate(ask("fills the cache", count=2))
    # As long as can be: it is to run still when the weights are there.
    room = engine.max_context - len(PROMPT)
    running = asyncio.create_task(engine.generate(ask("run", count=4, max_tokens=room, seed=3)))
    before = engine.stats().tokens
    await until(running, lambda: engine.stats().tokens >= before + 8)
    await engine.load_weights(version, dict(models[1].model.named_parameters()))
    with pytest.raises(Aborted):
        await running
    assert engine.version == version
    (sample,) = await engine.generate(ask("after"))
    assert_logprobs(models[1], sample)

    # What a swap goes back to is still there.
    ranks = engine._client.ranks

    async def spoiled(method: str, *arguments: Any) -> list[Any]:
        answers = await ranks(method, *arguments)
        if method == "paceline_swap":
            monkeypatch.undo()
            return ["rank 0: spoiled"]
        return answers

    monkeypatch.setattr(engine._client, "ranks", spoiled)
    with pytest.raises(SwapFailed, match="spoiled"):
        await load(engine, models[0])
    assert engine.version == version
    (sample,) = await engine.generate(ask("once more", seed=5))
    assert_logprobs(models[1], sample)


async def test_a_temperature_that_vllm_would_change_or_refuse_is_refused_first(
    engine: Engine, paths: tuple[Path, Path]
) -> None:
    for temperature in 0.005, 2.5:
        why = rf"temperature is {temperature}; the engine samples at 0\.01 to 2"
        with pytest.raises(GenerationFailed, match=why):
            await engine.generate(ask("extreme", temperature=temperature))
        greedy = ask("greedy", temperature=temperature, greedy=True)
        assert len(await engine.generate(greedy)) == 1
        with pytest.raises(EngineError, match=rf"rollout\.temperature is {temperature}"):
            config = tiny_config(paths[0], engine="vllm", temperature=temperature)
            make_engine(config, PromptTokenizer(config))


async def test_a_request_that_vllm_refuses_fails_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its checks are: an engine that has failed would end the worker."""
    monkeypatch.setattr(type(engine), "most_temperature", 9.0)
    with pytest.raises(GenerationFailed, match="vLLM: temperature must be in"):
        await engine.generate(ask("hot", temperature=2.5))
    assert len(await engine.generate(ask("warm"))) == 1


async def test_close_leaves_nobody_waiting(paths: tuple[Path, Path]) -> None:
    config = tiny_config(paths[0], max_tokens=400, engine="vllm", dtype="bfloat16")
    engine = make_test_engine("vllm", config)
    await engine.start()
    try:
        # Compared with a trainer that computes in bfloat16.
        await load(engine, Reference(paths[0]))
        waiting = asyncio.create_task(engine.generate(ask("x", count=8, max_tokens=300)))
        await until(waiting, lambda: engine.stats().running > 0)
    finally:
        await asyncio.wait_for(engine.close(), 60)
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(ask("y"))
    assert waiting.done() or await asyncio.wait({waiting}, timeout=1)
    assert waiting.exception() is not None
