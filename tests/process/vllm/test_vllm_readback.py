"""What loaders did with weights, read back from the memory they filled; without vLLM."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollout_worker.engine.parameters import differing
from rollout_worker.engine.vllm.quantised import QuantisedLayers
from rollout_worker.engine.vllm.rank_weights import RankWeights
from rollout_worker.engine.vllm.readback import Readback

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


def noted(weights: Weights, load: Callable[[Weights], None]) -> Readback:
    with Readback(weights) as notes:
        load(weights)
    return notes


def wrong(notes: Readback, weights: Weights) -> list[str]:
    """Names of the weights that differ from the memory they were copied to."""
    staged = RankWeights(weights)
    return differing(staged.parts(notes.views), complete=True)


def elements(notes: Readback) -> Counter[str]:
    found: Counter[str] = Counter()
    for (name, *_), memory in notes.views.items():
        found[name] += memory.numel()
    return found


WHOLE = {"q": 24, "k": 12, "v": 12, "norm": 6, "embed": 30}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_and_padded_parameters_are_read_back_whole(
    weights: Weights, dtype: torch.dtype
) -> None:
    notes = noted(weights, Model(dtype).load)
    assert (wrong(notes, weights), elements(notes)) == ([], WHOLE)


def test_a_shard_and_a_transposed_parameter_are_read_back(weights: Weights) -> None:
    model = nn.ParameterDict(
        {"part": nn.Parameter(torch.zeros(4, 3)), "turned": nn.Parameter(torch.zeros(6, 2))}
    )

    def load(given: Weights) -> None:
        model["part"].data.copy_(given["q"].narrow(1, 3, 3))
        model["turned"].data.copy_(given["k"].t())

    notes = noted(weights, load)
    assert (wrong(notes, weights), elements(notes)) == ([], {"q": 12, "k": 12})
    model["part"].data[1, 2] += 1
    assert wrong(notes, weights) == ["q"]


def test_what_was_overwritten_or_changed_after_it_was_loaded_is_found(weights: Weights) -> None:
    model = Model()

    def load(given: Weights) -> None:
        model.load(given)
        model.qkv.data[4:6].copy_(given["v"])  # v where k belongs
        model.norm.data[3] += 1e-7

    assert wrong(noted(weights, load), weights) == ["k", "norm"]


def test_a_parameter_that_was_copied_on_is_read_where_it_is_now(weights: Weights) -> None:
    """As a reload does: a fresh parameter is filled, then copied into the one that kernels use."""
    model, fresh = Model(), Model()

    def load(given: Weights) -> None:
        fresh.load(given)
        for name, parameter in model.named_parameters():
            parameter.data.copy_(getattr(fresh, name))

    notes = noted(weights, load)
    assert (wrong(notes, weights), elements(notes)) == ([], WHOLE)
    model.qkv.data[5, 2] = 0.0
    assert wrong(notes, weights) == ["k"]


def test_a_rehearsal_on_the_meta_device_is_not_taken_for_a_load(weights: Weights) -> None:
    assert not noted(weights, Model().to("meta").load).views


def planned(weights: Weights, model: nn.Module, load: Callable[[Weights], None]) -> Any:
    return noted(weights, load).plan(model, {"qkv", "norm", "embed"})


def test_a_plan_loads_other_weights_as_the_loader_would(weights: Weights) -> None:
    model, expected = Model(torch.bfloat16), Model(torch.bfloat16)
    plan = planned(weights, model, model.load)
    other = {name: weight * 2 - 1 for name, weight in weights.items()}
    assert plan.reproduces(model, RankWeights(weights))
    plan.apply(RankWeights(other))
    expected.load(other)
    for name, parameter in expected.named_parameters():
        assert torch.equal(getattr(model, name), parameter), name


def packed(model: Model, given: Weights) -> None:
    """Kernels keep a copy in another form."""
    Model().load(given)


def computed(model: Model, given: Weights) -> None:
    model.load(given)
    model.embed.data[5:] = given["embed"].mean(0)


def other(model: Model, given: Weights) -> None:
    """A parameter comes another way."""
    model.load({**given, "norm": torch.zeros(6)})


@pytest.mark.parametrize("how", [packed, computed, other])
def test_no_plan_where_loading_is_more_than_copying(
    weights: Weights, how: Callable[[Model, Weights], None]
) -> None:
    model = Model()
    assert planned(weights, model, partial(how, model)) is None


def test_no_plan_is_taken_that_does_not_give_what_the_loader_gave(weights: Weights) -> None:
    model = Model()

    def load(given: Weights) -> None:
        model.load(given)
        model.norm.data.add_(1)  # as where a checkpoint holds w - 1

    assert not planned(weights, model, load).reproduces(model, RankWeights(weights))


def test_parameters_that_no_checkpoint_carries_do_not_matter(weights: Weights) -> None:
    model = Model()
    model.scale = nn.Parameter(torch.ones(1), requires_grad=False)
    assert planned(weights, model, model.load) is not None


class OneScale:
    """Quantises a layer to float8 with one scale for all weights in it."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.scale = layer.weight.abs().max() / 448
        quantised = (layer.weight / layer.scale).to(torch.float8_e4m3fn)
        layer.weight = nn.Parameter(quantised, requires_grad=False)

    def apply(self, layer: Any, x: Tensor, _bias: None) -> Tensor:
        return x @ (layer.weight.float() * layer.scale).T


def test_a_quantised_layer_is_compared_by_what_its_kernel_multiplies_with() -> None:
    draw = torch.Generator().manual_seed(0)
    weights = {"q": 60 * torch.randn(32, 64, generator=draw), "k": torch.randn(32, 64)}
    layer: Any = nn.Module()
    layer.weight = nn.Parameter(torch.zeros(64, 64), requires_grad=False)
    layer.quant_method = OneScale()
    notes = Readback(weights)
    layers = QuantisedLayers(notes, RankWeights(weights), complete=True)
    with notes:
        layer.weight.data[:32].copy_(weights["q"])
        layer.weight.data[32:].copy_(weights["k"])
    layers._quantise(layer.quant_method)(layer)
    assert (layers.differing(), len(notes.views), len(notes.places())) == ([], 0, 2)
    layer.weight.data[:32] = layer.weight.data[:32].roll(1, 0)
    assert layers.differing() == ["q"]


def test_what_a_loader_computes_in_place_is_not_compared_with_the_weights() -> None:
    """vLLM copies Mamba's A_log into a parameter and turns it into -exp(A_log) there."""
    weights = {"A_log": torch.randn(4), "D": torch.randn(4)}
    both = torch.empty(8)
    with Readback(weights) as notes:
        for part, name in zip(both.chunk(2), weights, strict=True):
            part.copy_(weights[name])
        both[:4].copy_(-torch.exp(both[:4]))
    assert [key[0] for key in notes.views] == ["D"]
