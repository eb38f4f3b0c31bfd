"""What loaders did with weights, read back from the memory they filled; without vLLM."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollout_worker.engine.vllm.readback import Differs, ParameterSlice, Proof, Readback, compare

Weights = dict[str, Tensor]


@pytest.fixture
def weights() -> Weights:
    draw = torch.Generator().manual_seed(0)
    shapes = {"q": (4, 6), "k": (2, 6), "v": (2, 6), "norm": (6,), "embed": (5, 6)}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


class Model(nn.Module):
    """q, k and v fused, the embedding padded from 5 to 8 rows."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(8, 6, dtype=dtype), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(6, dtype=dtype), requires_grad=False)
        self.embed = nn.Parameter(torch.zeros(8, 6, dtype=dtype), requires_grad=False)

    def load(self, weights: Weights) -> None:
        for name, start in ("q", 0), ("k", 4), ("v", 6):
            self.qkv.data.narrow(0, start, len(weights[name])).copy_(weights[name])
        self.norm.data.copy_(weights["norm"])
        self.embed.data[: len(weights["embed"])] = weights["embed"]


def noted(
    weights: Weights, load: Callable[[Weights], None], model: nn.Module
) -> list[ParameterSlice]:
    """As they arrive: tuples have become lists."""
    with Readback(weights) as notes:
        load(weights)
    return [ParameterSlice(*piece) for piece in json.loads(json.dumps(notes.slices(model)))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_and_padded_parameters_are_read_back_whole(
    weights: Weights, dtype: torch.dtype
) -> None:
    model = Model(dtype)
    pieces = noted(weights, model.load, model)
    total = sum(weight.numel() for weight in weights.values())
    assert compare([pieces], weights) == Proof(total, total, total)


def test_two_shards_are_together_the_whole(weights: Weights) -> None:
    ranks = []
    for rank in range(2):
        model = Model()

        def load(given: Weights, rank: int = rank, model: Model = model) -> None:
            columns = {name: given[name].narrow(1, rank * 3, 3) for name in ("q", "k", "v")}
            for name, start in ("q", 0), ("k", 4), ("v", 6):
                model.qkv.data[start : start + len(given[name]), :3].copy_(columns[name])

        ranks.append(noted(weights, load, model))
    fused = sum(weights[name].numel() for name in ("q", "k", "v"))
    assert compare(ranks, weights).equal == fused
    assert compare(ranks[:1], weights).equal == fused // 2


def test_a_transposed_parameter_is_read_back(weights: Weights) -> None:
    model = nn.ParameterDict({"q": nn.Parameter(torch.zeros(6, 4))})
    pieces = noted(weights, lambda given: model["q"].data.copy_(given["q"].t()), model)
    assert compare([pieces], weights).equal == weights["q"].numel()


def test_what_was_overwritten_later_is_found(weights: Weights) -> None:
    model = Model()

    def load(given: Weights) -> None:
        model.load(given)
        model.qkv.data[4:6].copy_(given["v"])  # v where k belongs

    with pytest.raises(Differs, match="k on rank 0"):
        compare([noted(weights, load, model)], weights)


def test_what_changed_after_it_was_loaded_is_found(weights: Weights) -> None:
    model = Model()

    def load(given: Weights) -> None:
        model.load(given)
        model.norm.data[3] += 1e-7

    with pytest.raises(Differs, match="norm"):
        compare([noted(weights, load, model)], weights)


def test_other_weights_than_the_trainers_are_found(weights: Weights) -> None:
    model = Model()
    pieces = noted(weights | {"norm": weights["norm"] * 1.5}, model.load, model)
    with pytest.raises(Differs, match="norm"):
        compare([pieces], weights)


def test_what_is_not_loaded_is_not_counted(weights: Weights) -> None:
    model = Model()
    pieces = noted(weights, lambda given: model.norm.data.copy_(given["norm"]), model)
    assert compare([pieces], weights) == Proof(84, 6, 6)


def test_a_parameter_that_was_copied_on_is_read_where_it_is_now(weights: Weights) -> None:
    """As a reload does: a fresh parameter is filled, then copied into the one that kernels use."""
    model, fresh = Model(), Model()

    def load(given: Weights) -> None:
        fresh.load(given)
        for name, parameter in model.named_parameters():
            parameter.data.copy_(getattr(fresh, name))

    with Readback(weights) as notes:
        load(weights)
    assert compare([notes.slices(model)], weights).live == 84
    model.qkv.data[5, 2] = 0.0
    with pytest.raises(Differs, match="k on rank 0"):
        compare([notes.slices(model)], weights)


def test_what_kernels_keep_packed_is_read_from_what_was_packed(weights: Weights) -> None:
    model, fresh = nn.Module(), Model()
    proof = compare([noted(weights, fresh.load, model)], weights)
    assert proof == Proof(84, 84, 0)


def test_a_rehearsal_on_the_meta_device_is_not_taken_for_a_load(weights: Weights) -> None:
    model = Model().to("meta")
    assert noted(weights, model.load, model) == []


def planned(weights: Weights, model: nn.Module, load: Callable[[Weights], None]) -> Any:
    with Readback(weights) as notes:
        load(weights)
    return notes.plan(model, {"qkv", "norm", "embed"})


def test_a_plan_loads_other_weights_as_the_loader_would(weights: Weights) -> None:
    model, expected = Model(torch.bfloat16), Model(torch.bfloat16)
    plan = planned(weights, model, model.load)
    other = {name: weight * 2 - 1 for name, weight in weights.items()}
    assert plan.reproduces(model, weights)
    plan.apply(other)
    expected.load(other)
    for name, parameter in expected.named_parameters():
        assert torch.equal(getattr(model, name), parameter), name


def test_no_plan_where_kernels_keep_a_packed_copy(weights: Weights) -> None:
    model, fresh = Model(), Model()
    assert planned(weights, model, fresh.load) is None


def test_no_plan_where_a_loader_computes_a_parameter(weights: Weights) -> None:
    model = Model()

    def load(given: Weights) -> None:
        model.load(given)
        model.norm.data.add_(1)  # as where a checkpoint holds w - 1

    assert not planned(weights, model, load).reproduces(model, weights)


def test_no_plan_where_a_part_of_a_parameter_is_computed(weights: Weights) -> None:
    model = Model()

    def load(given: Weights) -> None:
        model.load(given)
        model.embed.data[5:] = given["embed"].mean(0)

    assert planned(weights, model, load) is None


def test_parameters_that_no_checkpoint_carries_do_not_matter(weights: Weights) -> None:
    model = Model()
    model.scale = nn.Parameter(torch.ones(1), requires_grad=False)
    assert planned(weights, model, model.load) is not None


def test_no_plan_where_a_parameter_came_another_way(weights: Weights) -> None:
    model = Model()

    def load(given: Weights) -> None:
        model.load({**given, "norm": torch.zeros(6)})

    assert planned(weights, model, load) is None
