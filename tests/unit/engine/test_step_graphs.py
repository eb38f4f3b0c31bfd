"""Decode steps as graphs: the same bits, one launch a token, and never on memory that has moved."""

import copy
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, MistralConfig, Qwen3Config

from paceline.process.parked_memory import ParkedMemory
from rollout_worker.engine.base import Request, SamplingParams
from rollout_worker.engine.parameters import WeightTable, copy_parts
from rollout_worker.engine.stopping import TokenTexts
from rollout_worker.engine.transformers.decoder import CacheShape, Decoder, SlotCache
from rollout_worker.engine.transformers.fused_decoder import FusedDecoder
from rollout_worker.engine.transformers.hf_decoder import HFDecoder
from rollout_worker.engine.transformers.scheduler import Scheduler
from rollout_worker.engine.transformers.step_graphs import NewGraph
from testbed.architectures import tiny_architecture
from testbed.dispatches import Counted
from tests.fakes.cuda_graph import FakeGraph, Refused

VOCABULARY, SLOTS, CONTEXT = 40, 12, 320
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
CONFIGS = {
    "fused": Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True),
    "general": MistralConfig(**SMALL, sliding_window=4),
}
DECODERS: dict[str, type[Any]] = {
    "fused": FusedDecoder,
    "general": HFDecoder,
    "recurrent": HFDecoder,
}
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7},
    {"greedy": True},
    {"top_k": 3},
    {"top_p": 0.6, "temperature": 1.4},
)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class NoGraph(FakeGraph):
    def capture(self, step: Any) -> None:
        super().capture(lambda: torch.ones(1).item())


class Graphs:
    """A NewGraph that keeps what it made."""

    def __init__(self, kind: type[FakeGraph] = FakeGraph) -> None:
        self.kind = kind
        self.made: list[FakeGraph] = []

    def __call__(self, other: Any) -> FakeGraph:
        self.made.append(self.kind(other))
        return self.made[-1]

    @property
    def replays(self) -> int:
        return sum(graph.replays for graph in self.made)


def model_of(kind: str, seed: int = 0) -> Any:
    if kind == "recurrent":
        model = tiny_architecture("qwen3_5_text", vocabulary=VOCABULARY, seed=seed)
        return model.requires_grad_(False)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIGS[kind]).eval().requires_grad_(False)


def scheduler_of(decoder: Decoder, new_graph: NewGraph | None) -> Scheduler:
    return Scheduler(
        decoder,
        slots=SLOTS,
        cache_tokens=SLOTS * CONTEXT,
        context=CONTEXT,
        end_tokens=(),
        texts=TokenTexts(str, VOCABULARY),
        new_graph=new_graph,
    )


def request(name: str, length: int, tokens: int, count: int = 1, **params: Any) -> Request:
    prompt = np.random.default_rng(length).integers(0, VOCABULARY, length).astype(np.int32)
    return Request(name, prompt, SamplingParams(tokens, seed=length, **params), count)


def swap(model: nn.Module, other: nn.Module) -> None:
    copy_parts(WeightTable(model).parts(dict(other.named_parameters())))


def generated(kind: str, new_graph: NewGraph | None) -> dict[Any, Any]:
    """Completions of a run in which requests of all kinds join, leave, are aborted and see new
    weights, and in which the cache grows."""
    model = model_of(kind)
    scheduler = scheduler_of(DECODERS[kind](model), new_graph)
    rng = np.random.default_rng(0)
    ended = []
    for step in range(400):
        if step in (0, 7, 40, 90):
            for number, params in enumerate(KINDS if step else KINDS[:3]):
                length, tokens = int(rng.integers(2, 60)), int(rng.integers(1, 180))
                count = int(rng.integers(1, 4))
                ended += scheduler.add(request(f"{step}/{number}", length, tokens, count, **params))
        if step in (25, 60):
            swap(model, model_of(kind, seed=step))
            scheduler.set_version(step)
        if step == 30:
            ended += scheduler.remove({"7/1"})
        ended += scheduler.step()
    assert not scheduler.batch.size and not scheduler.admission.waiting
    return {(item.request_id, item.index): item.completion for item in ended}


@pytest.mark.parametrize("kind", DECODERS)
def test_graphs_draw_the_same_bits(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """As the same steps without one, and within rounding of steps that are not padded."""
    graphs, none = Graphs(), Graphs(NoGraph)
    with caplog.at_level(logging.WARNING):
        by_hand = generated(kind, none)
    said = [record for record in caplog.records if record.name.endswith("step_graphs")]
    assert len(none.made) == len(said) == 1, "a capture that fails is said, once"
    assert "not permitted" in caplog.text
    captured, plain = generated(kind, graphs), generated(kind, None)
    assert graphs.replays > 250
    assert captured.keys() == by_hand.keys() == plain.keys() and len(plain) > 20
    for key, completion in captured.items():
        assert completion.tokens.tobytes() == by_hand[key].tokens.tobytes()
        assert completion.logprobs.tobytes() == by_hand[key].logprobs.tobytes()
        assert completion.tokens.tolist() == plain[key].tokens.tolist()
        assert completion.versions == by_hand[key].versions == plain[key].versions
        np.testing.assert_allclose(completion.logprobs, plain[key].logprobs, atol=1e-4)


def dispatches_a_token(scheduler: Scheduler) -> float:
    """While a full batch decodes; its sizes have been met before."""
    scheduler.add(request("x", 20, 100, SLOTS))
    for _ in range(10):
        scheduler.step()
    with Counted() as counted:
        for _ in range(20):
            scheduler.step()
    return counted.work["dispatches"] / 20


@pytest.mark.parametrize(("kind", "before"), [("fused", 75), ("general", 100)])
def test_a_token_of_a_full_batch_is_one_launch_and_two_copies(kind: str, before: int) -> None:
    graphs = Graphs()
    plain = scheduler_of(DECODERS[kind](model_of(kind)), None)
    assert dispatches_a_token(plain) > before
    captured = scheduler_of(DECODERS[kind](model_of(kind)), graphs)
    assert dispatches_a_token(captured) == 2
    # The first token came from the prefill, the second from the step that was captured.
    assert len(graphs.made) == 1 and graphs.replays == 30 - 2


@pytest.fixture
def running() -> Iterator[tuple[Any, Scheduler, Graphs]]:
    model, graphs = model_of("fused"), Graphs()
    scheduler = scheduler_of(FusedDecoder(model), graphs)
    scheduler.add(request("x", 20, 250, 3))
    for _ in range(5):
        scheduler.step()
    assert [graph.replays for graph in graphs.made] == [3]
    yield model, scheduler, graphs


def test_a_swap_in_place_keeps_the_graph(running: tuple[Any, Scheduler, Graphs]) -> None:
    model, scheduler, graphs = running
    swap(model, model_of("fused", seed=3))
    scheduler.set_version(1)
    scheduler.step()
    assert [graph.replays for graph in graphs.made] == [4]


def test_a_cache_that_grows_has_graphs_captured_again(
    running: tuple[Any, Scheduler, Graphs],
) -> None:
    _, scheduler, _ = running
    longer = request("y", 200, 2)  # its prefill makes the cache grow
    scheduler.add(longer)
    while scheduler.batch.size:
        scheduler.step()
    assert scheduler.tokens == 3 * 250 + 2


def test_a_turn_of_another_process_at_the_device_ends_graphs(
    running: tuple[Any, Scheduler, Graphs],
) -> None:
    """Neither they nor the cache keep memory meanwhile, and weights come back elsewhere."""
    model, scheduler, graphs = running
    scheduler.remove({"x"})
    scheduler.drop_cache()
    gone = [weakref.ref(graph) for graph in graphs.made]
    graphs.made.clear()
    assert [graph() for graph in gone] == [None]
    parked = ParkedMemory(torch.device("cpu"), moves=True)
    parked.copy(model.parameters())
    parked.park()
    parked.unpark()
    scheduler.set_version(1)
    scheduler.add(request("y", 20, 5, 3))
    while scheduler.batch.size or scheduler.admission.waiting:
        scheduler.step()
    assert [graph.replays for graph in graphs.made] == [3]


def test_prefills_have_few_shapes() -> None:
    shapes = set()

    class Watched(FusedDecoder):
        def prefill(self, tokens: torch.Tensor, lengths: torch.Tensor) -> Any:
            shapes.add(tuple(tokens.shape))
            return super().prefill(tokens, lengths)

    scheduler = scheduler_of(Watched(model_of("fused")), Graphs())
    rng = np.random.default_rng(1)
    for number in range(60):
        for index in range(int(rng.integers(1, 9))):
            scheduler.add(request(f"{number}/{index}", int(rng.integers(1, CONTEXT - 2)), 2))
        while scheduler.batch.size or scheduler.admission.waiting:
            scheduler.step()
    sequences, lengths = (set(sizes) for sizes in zip(*shapes, strict=True))
    assert sequences <= {1, 2, 3, 4, 6, 8, 12} and lengths <= {128, 192, 256, CONTEXT}


def test_the_imitation_refuses_what_a_cuda_graph_refuses() -> None:
    x = torch.ones(4)
    kept = torch.zeros(4)

    def refuses(step: Any) -> bool:
        with pytest.raises(Refused):
            FakeGraph().capture(step)
        return True

    assert refuses(lambda: kept.copy_(x * x.sum().item()))
    assert refuses(lambda: kept.copy_(x[x > 0]))
    assert refuses(lambda: kept.numpy())
    assert refuses(lambda: kept.add_(torch.tensor([1.0])))
    assert refuses(lambda: FakeGraph().capture(lambda: kept.add_(1)))
    with pytest.raises(Refused, match="before"):
        FakeGraph().replay()
    graph = FakeGraph()
    graph.capture(lambda: kept.copy_((x * 2).view(2, 2).t().reshape(4)))
    x.copy_(torch.arange(4.0))
    graph.replay()
    assert kept.tolist() == [0, 4, 2, 6]
    again = copy.copy(graph)
    x.resize_(100)
    for move in (lambda: None, lambda: x.set_(torch.ones(4))):
        move()
        with pytest.raises(Refused, match="moved"):
            again.replay()


def test_the_cache_doubles_up_to_the_longest_sequence():
    shape = CacheShape(1, 1, 1, 1, torch.float32, torch.device("cpu"))
    lengths = {}
    for longest in (0, 150):
        cache = SlotCache(shape, longest)
        for length in (100, 129):
            cache.reserve(1, length, 0, 0)
        lengths[longest] = cache.length
    assert lengths == {0: 256, 150: 160}
