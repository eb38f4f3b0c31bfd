"""Parity guard: weights that a swap left out are noticed before a token is generated with them."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout_worker.engine import parameters
from rollout_worker.engine.base import (
    Aborted,
    EngineStats,
    ParametersDiffer,
    Request,
    SamplingParams,
)
from rollout_worker.engine.parameters import WHOLE, ParameterPart, differing
from rollout_worker.engine.transformers import engine as transformers_engine
from testbed.tiny_model import make_tiny_model
from tests.fixtures.engines import Reference, make_test_engine, tiny_config

PROMPT = [13, 5, 8, 3, 14]


def trained(source: torch.Tensor, share: float, seed: int = 0) -> torch.Tensor:
    """``source`` with this share of its elements changed."""
    generator = torch.Generator().manual_seed(seed)
    changed = torch.rand(source.shape, generator=generator) < share
    return torch.where(changed, source + 1, source)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_was_left_out_differs_though_few_of_its_elements_changed(
    dtype: torch.dtype,
) -> None:
    old = torch.randn(300, 700)
    new = trained(old, 0.01)
    left_out, loaded = (
        ParameterPart("a", old.to(dtype), new),
        ParameterPart("b", new.to(dtype), new),
    )
    for _ in range(50):
        found = differing([left_out, loaded], complete=False)
        assert found == ["a"], "1 % changed: 4,096 elements miss it once in 10**18 times"


def test_one_wrong_element_is_found_by_a_complete_comparison_and_in_small_weights() -> None:
    large, small = torch.zeros(3, 5 * WHOLE), torch.zeros(WHOLE)
    wrong = large.clone(), small.clone()
    wrong[0][2, 17] = wrong[1][-1] = 1e-30
    parts = [ParameterPart("large", wrong[0], large), ParameterPart("small", wrong[1], small)]
    assert differing(parts, complete=True) == ["large", "small"]
    assert differing(parts[1:], complete=False) == ["small"]


def test_every_comparison_samples_other_elements() -> None:
    """What one sample misses, a later one finds."""
    parameters._places.seed(5)
    old = torch.zeros(200, 1000)
    new = trained(old, 3e-5)
    found = [differing([ParameterPart("w", old, new)], complete=False) for _ in range(60)]
    assert [] in found and ["w"] in found


def test_new_rows_of_an_embedding_and_experts_are_sampled_too() -> None:
    embedding = torch.zeros(50_000, 64)
    seen = embedding.clone()
    seen[torch.randperm(50_000, generator=torch.Generator().manual_seed(3))[:1500]] = 1.0
    experts = torch.zeros(64, 96, 200)
    parts = [
        ParameterPart("embedding", embedding, seen),
        ParameterPart("experts", experts, trained(experts, 0.01)),
    ]
    for _ in range(20):
        assert differing(parts, complete=False) == ["embedding", "experts"]


def test_transposed_empty_and_scalar_memory_is_compared() -> None:
    weight = torch.randn(128, 96)
    transposed = weight.t().contiguous().t()
    parts = [
        ParameterPart("t", transposed, weight),
        ParameterPart("empty", torch.empty(0, 4), torch.empty(0, 4)),
        ParameterPart("scalar", torch.tensor(2.0), torch.tensor(3.0)),
        ParameterPart("nan", torch.full((3,), torch.nan), torch.full((3,), torch.nan)),
    ]
    for complete in False, True:
        assert differing(parts, complete=complete) == ["scalar"]
    assert differing([], complete=True) == []


class LeavesOut:
    """In place of copy_parts: leaves weights out of the copies."""

    def __init__(self) -> None:
        self.names: Sequence[str] = ()
        self._copy = transformers_engine.copy_parts

    def __call__(self, parts: Sequence[ParameterPart]) -> None:
        self._copy([part for part in parts if part.name not in self.names])


@pytest.fixture
def leaves_out(monkeypatch: pytest.MonkeyPatch) -> LeavesOut:
    fault = LeavesOut()
    monkeypatch.setattr(transformers_engine, "copy_parts", fault)
    return fault


def weights_of(reference: Reference, seed: int) -> dict[str, torch.Tensor]:
    named = reference.model.named_parameters()
    return {name: trained(tensor.detach(), 0.05, seed) for name, tensor in named}


def ask(name: str, tokens: int, count: int = 1) -> Request:
    return Request(name, np.array(PROMPT, np.int32), SamplingParams(tokens), count)


async def progress(engine: Any, since: EngineStats, tokens: int) -> None:
    while engine.stats().tokens < since.tokens + tokens:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("kind", ["fused", "general"])
async def test_no_token_is_generated_after_a_swap_that_left_out_a_tensor(
    kind: str, tmp_path: Path, leaves_out: LeavesOut
) -> None:
    reference = Reference(make_tiny_model(tmp_path / "model", hidden=128))
    config = tiny_config(tmp_path / "model", max_tokens=400)
    engine = make_test_engine(kind, config)
    await engine.start()
    try:
        await engine.load_weights(0, weights_of(reference, 0))
        running = asyncio.create_task(engine.generate(ask("before", 380, count=2)))
        await progress(engine, engine.stats(), 4)
        leaves_out.names = ["model.layers.0.self_attn.k_proj.weight"]
        with pytest.raises(ParametersDiffer, match=r"version 1 .*layers\.0\.self_attn\.k_proj"):
            await engine.load_weights(1, weights_of(reference, 1))
        assert engine.version == -1
        before = engine.stats()
        later = asyncio.create_task(engine.generate(ask("later", 4)))
        engine.abort("before")
        with pytest.raises(Aborted) as aborted:
            await running
        assert {v for c in aborted.value.partial if c for v, _ in c.versions} == {0}
        assert engine.stats().tokens == before.tokens and not later.done()
        # The weights come again, by another transfer: what waited is generated with them.
        leaves_out.names = []
        await engine.load_weights(1, weights_of(reference, 1))
        (completion,) = await asyncio.wait_for(later, 60)
        assert engine.version == 1 and completion.versions == ((1, 4),)
    finally:
        await engine.close()
