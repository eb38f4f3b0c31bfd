"""Parts of the engine, mostly without vLLM itself, and what its arguments may be."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from paceline.config.schema import Config
from paceline.prompt_tokenizer import PromptTokenizer
from rollout_worker.engine.base import (
    Aborted,
    Completion,
    EngineDied,
    EngineError,
    Finish,
    Request,
    SamplingParams,
)
from rollout_worker.engine.choice import make_engine
from rollout_worker.engine.parameters import differing
from rollout_worker.engine.vllm import engine as engine_module
from rollout_worker.engine.vllm import rank_weights, worker_extension
from rollout_worker.engine.vllm.client import VLLMClient, engine_arguments, start_error
from rollout_worker.engine.vllm.engine import VLLMEngine
from rollout_worker.engine.vllm.generation import join
from rollout_worker.engine.vllm.rank_weights import CopyPlan, RankWeights, stage_for
from rollout_worker.engine.vllm.readback import mean_gap, probe, tolerance
from rollout_worker.engine.vllm.worker_extension import PacelineRank
from testbed import architectures
from testbed.tiny_model import make_tiny_model
from tests.fixtures.engines import needs_vllm, tiny_config
from tests.fixtures.policy_models import tiny_network


class Rank(PacelineRank):
    rank = 0
    device = torch.device("cpu")


def test_weights_given_up_while_they_are_staged_are_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine has stopped waiting for a slow rank: nobody would drop them again."""
    rank, go_on = Rank(), threading.Event()

    def slow(description: str) -> dict[str, torch.Tensor]:
        assert go_on.wait(60)
        return {"weight": torch.zeros(1)}

    monkeypatch.setattr(worker_extension, "read", slow)
    for key in 1, 2:
        rank.paceline_stage(key, "")
    rank.paceline_drop(1)
    assert rank.paceline_staged(2) is None
    staging = [thread for thread in threading.enumerate() if thread.name == "stage-weights"]
    go_on.set()
    for thread in staging:
        thread.join(60)
    assert rank.paceline_staged(1) is None and rank.paceline_staged(2) == ""
    assert set(rank._paceline_weights.staged) == {2}
    rank.paceline_drop(2)
    assert not rank._paceline_weights.staged and not rank._paceline_weights.wanted


class HalfOfRows:
    """A rank that copies the last two of the four rows of a weight."""

    def __init__(self) -> None:
        self.weights = {"w": torch.arange(8.0).view(4, 2), "unused": torch.ones(100)}
        self.expected = self.weights["w"][2:].clone()
        self.memory = torch.zeros(2, 2)
        self.plan = CopyPlan({("w", 4, (2, 2), (2, 1), self.memory.data_ptr()): self.memory})

    def staged_on(self, device: str, plan: CopyPlan | None, ranks: int = 2) -> RankWeights:
        return stage_for(torch.device(device), self.weights, plan, ranks=ranks)

    def swaps(self, staged: RankWeights) -> bool:
        self.plan.apply(staged)
        same = not differing(staged.parts(self.plan.views), complete=True)
        return same and torch.equal(self.memory, self.expected)


def test_a_rank_stages_the_slices_that_it_copies_and_nothing_else() -> None:
    rank = HalfOfRows()
    staged = rank.staged_on("cpu", rank.plan)
    assert [t.numel() for t in staged.slices.values()] == [4]
    rank.weights["w"].zero_()
    assert rank.swaps(staged), "from its own copy"


def test_a_rank_without_room_takes_its_slices_from_host_memory(monkeypatch: Any) -> None:
    engines = {"stream": 0, "total_size": 99, "allocated_size": 0}  # for its next long prompt
    found = {"mem_get_info": (10, 99), "memory_snapshot": [engines], "memory_reserved": 99}
    for name, value in found.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(rank_weights, "_stream", lambda device: SimpleNamespace(cuda_stream=7))
    rank = HalfOfRows()
    staged = rank.staged_on("cuda", rank.plan)
    assert not staged.slices and rank.swaps(staged)


def test_parts_that_an_earlier_plan_did_not_copy_come_from_host_memory() -> None:
    rank = HalfOfRows()
    other = CopyPlan({("w", 0, (2, 2), (2, 1), rank.memory.data_ptr()): rank.memory})
    assert rank.swaps(rank.staged_on("cpu", other))


@pytest.mark.parametrize(("ranks", "whole"), [(1, True), (2, False)])
def test_without_a_plan_only_an_engine_of_one_rank_stages_the_whole(
    ranks: int, whole: bool
) -> None:
    rank = HalfOfRows()
    staged = rank.staged_on("cpu", None, ranks)
    assert (staged.tensors["w"] is not rank.weights["w"]) == whole and not staged.slices
    assert rank.swaps(staged) and staged.off_device().tensors is rank.weights


def letters(tokens: Any) -> str:
    return "".join(chr(token) for token in tokens)


def said(text: str, finish: Finish = Finish.PARTIAL) -> Completion:
    n = len(text)
    tokens = np.array([ord(c) for c in text], np.int32)
    return Completion(tokens, np.full(n, -0.5, np.float32), ((3, n // 2), (4, n - n // 2)), finish)


def test_a_stop_string_that_straddles_the_prefix_is_found_in_unfinished_output() -> None:
    output = SimpleNamespace(
        token_ids=[ord(c) for c in "NDxyz"],
        logprobs=SimpleNamespace(logprobs=[-0.5] * 5),
        weight_versions=[SimpleNamespace(version="4", start=0, end=5)],
        finish_reason="abort",
        stop_reason=None,
    )
    sample = join(said("abcE"), output, ("END",), letters)
    assert sample is not None
    assert (letters(sample.tokens), sample.finish, sample.stop) == ("abcEND", Finish.STOP, "END")


def test_only_large_logits_round_by_a_twentieth_and_quantising_has_a_bound_too() -> None:
    assert tolerance("bfloat16", 0.5, quantised=False) < 0.015
    assert tolerance("float32", 0.5, quantised=False) <= 1e-3
    small, large = (tolerance("bfloat16", size, quantised=False) for size in (0.5, 4.0))
    assert small < large < tolerance("bfloat16", 100.0, quantised=False) <= 0.05
    assert 0.05 < tolerance("bfloat16", 0.5, quantised=True) < 1.0


@pytest.mark.parametrize(
    ("processes", "kind"),
    [("{'EngineCore': -9}", EngineDied), ("{'EngineCore': 1}", EngineError), ("{}", EngineError)],
)
def test_a_start_that_was_killed_is_told_from_one_that_failed(
    processes: str, kind: type[EngineError]
) -> None:
    """The words are those of the pinned vLLM."""
    said = "Engine core initialization failed. See root cause above. Failed core proc(s): "
    assert type(start_error(RuntimeError(said + processes))) is kind


async def test_an_engine_that_is_lost_once_it_was_up_is_no_bad_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank is killed at the end of the start: vLLM's first answer says so in words of its own."""

    async def up(client: VLLMClient) -> None:
        client.llm = SimpleNamespace(errored=False, update_weight_version=lost)

    async def lost(version: str) -> None:
        raise RuntimeError("Call to update_weight_version method failed: Executor failed.")

    monkeypatch.setattr(VLLMClient, "start", up)
    config = Config.model_validate({"model": {"path": "unused"}, "data": {"path": "unused"}})
    tokenizer: Any = SimpleNamespace(decode_all=letters, end_tokens=())
    engine = VLLMEngine(config, tokenizer)
    with pytest.raises(EngineDied, match="Executor failed"):
        await engine.start()


@needs_vllm
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"enforce_eagre": True},
            "enforce_eagre is not an engine argument",
        ),
        ({"nonsense": 1}, "rollout.vllm.nonsense is not an engine argument"),
        ({"max_num_seqs": 4}, "set by rollout.max_sequences"),
        ({"logprobs_mode": "raw_logprobs"}, "cannot be changed"),
        ({"gpu_memory_utilization": 7}, "gpu_memory_utilization"),
    ],
)
async def test_a_wrong_argument_is_named_before_anything_starts(
    tmp_path: Path, given: dict[str, object], message: str
) -> None:
    config = tiny_config(make_tiny_model(tmp_path), engine="vllm", vllm=given)
    engine = make_engine(config, PromptTokenizer(config))
    with pytest.raises(EngineError, match=message):
        await engine.start()
    await engine.close()


@needs_vllm
def test_the_share_of_a_gpu_is_the_plans_unless_it_is_given(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path)
    model, gpu = AutoConfig.from_pretrained(path), 80 << 30
    for given, expected in ({}, 0.68), ({"gpu_memory_utilization": 0.5}, 0.5):
        config = tiny_config(path, engine="vllm", vllm=given)
        arguments = engine_arguments(config, model, parameters=8_190_000_000, gpu=gpu)
        assert arguments["gpu_memory_utilization"] == expected


def test_other_engines_refuse_what_only_vllm_can(tmp_path: Path) -> None:
    for rollout in ({"on_update": "drain"}, {"on_update": "recompute"}, {"tensor_parallel": 2}):
        config = tiny_config(make_tiny_model(tmp_path), **rollout)
        with pytest.raises(EngineError, match="vllm"):
            make_engine(config, PromptTokenizer(config))


@pytest.mark.parametrize("wrong", [0.0, 0.5])
def test_the_first_sync_is_compared_in_one_forward(wrong: float) -> None:
    """Of completions that end early, too."""
    model, request = tiny_network("qwen3", scorer=False), probe(20, 64)
    rng, completions = np.random.default_rng(0), list[Completion]()
    for length in (5, 1, 9):
        tokens = rng.integers(0, 20, length)
        ids = torch.from_numpy(np.concatenate([request.prompt_tokens, tokens]))[None]
        logits = model(input_ids=ids).logits[0, len(request.prompt_tokens) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, torch.from_numpy(tokens)[:, None])[:, 0]
        found = logprobs.detach().numpy() + np.float32(wrong)
        completions.append(Completion(tokens.astype(np.int32), found, [], Finish.LENGTH))
    asked: list[Any] = []
    model.register_forward_pre_hook(lambda *_: asked.append(1))
    gap, _ = mean_gap(lambda tensors: model, {}, request, tuple(completions))
    assert gap == pytest.approx(wrong, abs=1e-5) and len(asked) == 1


class SleepingDevice:
    """vLLM's memory on a GPU, with what does not survive there as an error: weights copied, or
    tokens generated, where there is no memory, and a cache for which staged weights leave no
    room."""

    def __init__(self) -> None:
        self.awake = {"weights", "kv_cache"}
        self.staged = False
        self.done: list[str] = []
        self.llm: Any = self
        self.engine_core: Any = self
        self.output_processor = SimpleNamespace(request_states={})
        self.spec = SimpleNamespace(
            base=None,
            slots=False,
            table=SimpleNamespace(canonical=lambda tensors: tensors),
            ranks=1,
            quantised=False,
            scale=None,
            routed=(),
        )

    async def sleep(self, level: int) -> None:
        assert self.awake == {"weights", "kv_cache"} and not self.staged
        self.awake = set()
        self.done.append(f"sleep {level}")

    async def wake_up(self, tags: list[str]) -> None:
        assert not self.awake & set(tags), "it is awake"
        assert tags == ["weights"] or not self.staged, "no room for the cache"
        self.awake |= set(tags)
        self.done.append(f"wake {' '.join(tags)}")

    async def ranks(self, method: str, *args: Any) -> list[Any]:
        if method == "paceline_swap":
            assert "weights" in self.awake, "illegal memory access"
            self.done.append("fill")
        if method == "paceline_leave_device":
            self.staged = False
        return [[]] if method == "paceline_check" else [""]

    async def stage(self, client: Any, weights: Any) -> None:
        self.staged = True

    async def resume_generation(self) -> None:
        assert self.awake == {"weights", "kv_cache"}, "illegal memory access"

    async def call(self, work: Any) -> Any:
        return await work

    async def nothing(self, *args: Any, **named: Any) -> None: ...

    pause_scheduler_async = update_weight_version = reset_prefix_cache = abort = nothing


@pytest.mark.asyncio
async def test_an_engine_sleeps_without_requests_and_wakes_weights_before_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every turn, whether or not a newer version has come."""
    config = tiny_config(make_tiny_model(tmp_path), turns=True)
    engine, device = VLLMEngine(config, PromptTokenizer(config)), SleepingDevice()
    monkeypatch.setattr(engine_module, "stage", device.stage)
    engine._client = engine._requests._client = device  # type: ignore[assignment]
    engine._first_sync = False
    engine.vocabulary, engine.max_context = 15, 64
    await engine.load_weights(0, {"w": torch.ones(2)})
    assert engine.version == 0
    for version in 0, 1:
        device.done.clear()
        await engine.park()
        assert engine.version == -1 and device.awake == set()
        request = Request("a", np.array([3], np.int32), SamplingParams(max_tokens=4))
        with pytest.raises(Aborted):
            await engine.generate(request)
        await engine.unpark()
        assert engine.version == -1
        await engine.load_weights(version, {"w": torch.ones(2)})
        assert engine.version == version
        assert device.done == ["sleep 2", "wake weights", "fill", "wake kv_cache"]


def test_turns_without_a_gpu_are_refused_with_what_would_work(tmp_path: Path) -> None:
    config = tiny_config(make_tiny_model(tmp_path), turns=True, engine="vllm")
    model = AutoConfig.from_pretrained(config.model.path)
    with pytest.raises(EngineError, match=r"needs a GPU.*rollout.engine = .transformers"):
        engine_arguments(config, model, parameters=1, gpu=None)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "falcon_h1", "qwen3_next", "lfm2"])
def test_prompts_are_cached_on_a_cpu_unless_a_layer_is_recurrent(
    family: str, tmp_path: Path
) -> None:
    """vLLM refuses to cache those if it may not split prompts."""
    config = tiny_config(make_tiny_model(tmp_path), engine="vllm")
    arguments = engine_arguments(config, architectures.tiny_config(family), parameters=1, gpu=None)
    assert arguments["enable_prefix_caching"] == (family in ("qwen3", "gemma3_text"))
