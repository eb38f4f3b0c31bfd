"""vLLM's choice of experts, as ``rollout.router_replay`` takes it."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from paceline.expert_routes import RouteNotes
from paceline.payloads.routes import UNKNOWN
from paceline.prompt_tokenizer import PromptTokenizer
from rollout_worker.engine.base import (
    Aborted,
    Completion,
    EngineError,
    Finish,
    Request,
    SamplingParams,
)
from rollout_worker.engine.choice import make_engine
from rollout_worker.engine.vllm import internals
from rollout_worker.engine.vllm.client import engine_arguments
from rollout_worker.engine.vllm.routes import SlotRoutes, layers_with_experts, with_routes
from testbed.architectures import tiny_architecture
from testbed.fleets.controllers import until
from testbed.tiny_model import make_tiny_model
from tests.fixtures.engines import Reference, needs_vllm, tiny_config

pytestmark = needs_vllm

PREFIX = [3 + i * 7 % 10 for i in range(40)]
"""Longer than a block of the cache: vLLM computes it once."""


class Expected(Reference):
    """Log-probs and choices of transformers' own forward."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.notes = RouteNotes(self.model)

    def check(self, prompt: Sequence[int], completion: Completion) -> None:
        """The last token was no input."""
        logprobs = self.logprobs(prompt, completion)
        chosen = self.notes.take()
        np.testing.assert_allclose(completion.logprobs, logprobs, atol=1e-4)
        assert chosen is not None and completion.routes is not None
        assert completion.prompt_routes is not None
        routes = np.concatenate([completion.prompt_routes, completion.routes])
        assert (routes[-1] == UNKNOWN).all()
        noted = routes[:-1].reshape(-1, 2, 2)
        wanted = chosen.numpy()[: len(noted)].reshape(noted.shape)
        np.testing.assert_array_equal(np.sort(noted), np.sort(wanted).astype(np.uint16))


@pytest.mark.long
async def test_experts_compute_with_the_weights_of_each_swap_and_are_noted_for_each_token(
    tmp_path: Path,
) -> None:
    """A CPU kernel packs the experts' weights when they are loaded first. More sequences than
    slots, prompts that come from the cache, and an abort."""
    torch.set_num_threads(1)
    paths = [make_tiny_model(tmp_path / str(s), hidden=128, seed=s, experts=4) for s in (0, 1)]
    config = tiny_config(
        paths[0],
        slots=4,
        max_tokens=64,
        engine="vllm",
        router_replay=True,
        vllm={"block_size": 32},
    )
    engine = make_engine(config, PromptTokenizer(config))
    await engine.start()
    try:
        first, second = map(Expected, paths)
        for version, model in enumerate((first, second, first)):
            await engine.load_weights(version, dict(model.model.named_parameters()))
            requests = [
                Request(
                    f"{version}-{number}",
                    np.array(PREFIX[: 40 - 5 * number], np.int32),
                    SamplingParams(max_tokens=5 + 7 * number, seed=number),
                    count=3,
                )
                for number in range(4)
            ]
            made = await asyncio.gather(*map(engine.generate, requests))
            for request, completions in zip(requests, made, strict=True):
                for completion in completions:
                    model.check(request.prompt_tokens.tolist(), completion)
            prompt, before = requests[0].prompt_tokens, engine.stats().tokens
            long = Request(f"{version}-long", prompt, SamplingParams(max_tokens=64), count=2)
            running = asyncio.ensure_future(engine.generate(long))
            await until(lambda before=before: engine.stats().tokens > before)
            engine.abort(long.request_id)
            (ended,) = await asyncio.gather(running, return_exceptions=True)
            if isinstance(ended, Aborted):
                long = replace(long, request_id=f"{version}-again", prefixes=ended.partial)
                ended = await engine.generate(long)
            for completion in ended:
                model.check(PREFIX, completion)
    finally:
        await engine.close()


def test_outputs_of_a_gpu_have_them_for_all_layers_and_all_tokens_but_the_last() -> None:
    """A continued completion keeps what it has: its cache was computed with it."""
    first = np.arange(5 * 3 * 2, dtype=np.uint8).reshape(5, 3, 2)  # of 3 + 3 tokens
    tokens, logprobs = np.array([7, 8, 9], np.int32), np.zeros(3, np.float32)
    made = Completion(tokens, logprobs, ((0, 3),), Finish.PARTIAL)
    begun = with_routes(made, None, first, 3, (0, 2))
    assert begun.routes is not None and begun.prompt_routes is not None
    assert begun.prompt_routes.tolist() == [[0, 1, 4, 5], [6, 7, 10, 11], [12, 13, 16, 17]]
    assert begun.routes.tolist() == [[18, 19, 22, 23], [24, 25, 28, 29], [UNKNOWN] * 4]
    again = np.full((7, 3, 2), 99, np.uint8)
    longer = Completion(
        np.arange(5, dtype=np.int32), np.zeros(5, np.float32), ((0, 5),), made.finish
    )
    went_on = with_routes(longer, begun, again, 3, (0, 2))
    assert went_on.routes is not None and went_on.prompt_routes is begun.prompt_routes
    assert went_on.routes[:2].tolist() == begun.routes[:2].tolist()
    assert went_on.routes[2:].tolist() == [[99] * 4, [99] * 4, [UNKNOWN] * 4]
    assert with_routes(made, begun, None, 3, (0, 2)).routes is begun.routes
    unnoted = with_routes(longer, begun, None, 3, (0, 2)).routes
    assert unnoted is not None and unnoted[2:].tolist() == [[UNKNOWN] * 4] * 3
    strange = with_routes(longer, made, again, 3, (0, 2))  # of another worker
    assert strange.routes is not None and (strange.routes[:2] == UNKNOWN).all()
    cut = with_routes(made, None, again, 3, (0, 2))  # at a stop string
    assert cut.routes is not None and (cut.routes[2] == UNKNOWN).all()


def test_a_request_that_is_ended_while_it_is_preempted_has_no_routes_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted = SlotRoutes.__new__(SlotRoutes)
    noted._slots = torch.arange(4, dtype=torch.int16).reshape(2, 2, 1)
    noted._runner = SimpleNamespace(input_batch=SimpleNamespace(req_id_to_index={"scheduled": 0}))
    monkeypatch.setattr(internals, "slots_of", lambda runner, state: torch.tensor([1, 0]))
    assert noted._read(SimpleNamespace(req_id="scheduled")).ravel().tolist() == [2, 3, 0, 1]
    unknown = noted._read(SimpleNamespace(req_id="preempted"))
    assert (unknown.astype(np.uint16) == UNKNOWN).all() and noted._slots.min() == 0


def test_vllm_is_asked_for_them_on_a_gpu_alone_and_refuses_on_a_cpu(tmp_path: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    make_tiny_model(tmp_path, hidden=128, experts=4)
    model = Reference(tmp_path).model
    assert layers_with_experts(model) == (0, 1)
    asked = {"engine": "vllm", "router_replay": True}
    config = tiny_config(tmp_path, **asked)
    sizes = {"parameters": 1 << 20, "gpu": 80 << 30}
    on_gpu = engine_arguments(config, model.config, **sizes)
    on_cpu = engine_arguments(config, model.config, **sizes | {"gpu": None})
    assert on_gpu["enable_return_routed_experts"] is True
    assert "enable_return_routed_experts" not in on_cpu
    with pytest.raises(ValueError, match="requires Model Runner V2"):
        AsyncEngineArgs(**on_cpu, enable_return_routed_experts=True).create_engine_config()
    off = tiny_config(tmp_path, engine="vllm", vllm={"enable_return_routed_experts": True})
    with pytest.raises(EngineError, match=r"is set by rollout\.router_replay"):
        engine_arguments(off, model.config, **sizes)
    with pytest.raises(EngineError, match="has no layer of experts"):
        layers_with_experts(tiny_architecture("qwen3"))
