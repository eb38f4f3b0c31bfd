"""The suite that every engine passes, on every path it has."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
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
    Finish,
    GenerationFailed,
    Request,
    SamplingParams,
    WeightMismatch,
)
from rollout_worker.engine.transformers import engine as transformers_engine
from testbed.tiny_model import make_tiny_model
from tests.fixtures.engines import ENGINES, Reference, make_test_engine, tiny_config

PROMPTS = [[13, 5, 8, 3, 14], [13, 4, 14], [13, 9, 9, 3, 7, 6, 5, 12, 4, 14], [13, 3, 14]]
MAX_TOKENS = 24
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=128)


@pytest.fixture(scope="module")
def other_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("other"), hidden=128, seed=7)


@pytest.fixture(scope="module")
def reference(model_path: Path) -> Iterator[Reference]:
    yield Reference(model_path)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared() -> AsyncIterator[dict[str, Engine]]:
    """Engines that take too long to start for each test; one test after another uses them."""
    engines: dict[str, Engine] = {}
    yield engines
    for engine in engines.values():
        await engine.close()


@pytest_asyncio.fixture(params=ENGINES, loop_scope="module")
async def engine(
    request: pytest.FixtureRequest,
    model_path: Path,
    reference: Reference,
    shared: dict[str, Engine],
) -> AsyncIterator[Engine]:
    """An idle engine with the model's weights, at any version."""
    if request.param in shared:
        engine = shared[request.param]
        await engine.load_weights(engine.version + 1, dict(reference.model.named_parameters()))
        yield engine
        return
    engine = make_test_engine(request.param, tiny_config(model_path, max_tokens=400))
    await engine.start()
    if request.param == "vllm":
        shared["vllm"] = engine
    yield engine
    if request.param not in shared:
        await engine.close()


def ask(
    name: str,
    prompt: list[int],
    *,
    count: int = 1,
    prefixes: tuple[Completion | None, ...] = (),
    **params,
) -> Request:
    params.setdefault("max_tokens", MAX_TOKENS)
    return Request(
        name, np.array(prompt, dtype=np.int32), SamplingParams(**params), count, prefixes
    )


async def until(engine: Engine, task: asyncio.Task[object], tokens: int) -> None:
    """Until the engine has made so many tokens more, while ``task``, just created, runs."""
    tokens += engine.stats().tokens
    while engine.stats().tokens < tokens:
        assert not task.done(), task
        await asyncio.sleep(0.0005)


def same(a: Completion, b: Completion) -> bool:
    return (
        np.array_equal(a.tokens, b.tokens)
        and np.allclose(a.logprobs, b.logprobs, atol=1e-4)
        and (a.finish, a.versions) == (b.finish, b.versions)
    )


async def test_greedy_equals_transformers_generate(engine: Engine, reference: Reference) -> None:
    answers = await asyncio.gather(
        *(engine.generate(ask(f"g{i}", p, greedy=True)) for i, p in enumerate(PROMPTS))
    )
    for prompt, (sample,) in zip(PROMPTS, answers, strict=True):
        assert sample.tokens.tolist() == reference.greedy(prompt, MAX_TOKENS)


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 3},
        {"top_p": 0.6},
        {"temperature": 1.7, "top_k": 5, "top_p": 0.8},
    ],
)
async def test_logprobs_are_those_of_the_distribution_sampled_from(
    engine: Engine, reference: Reference, filters: dict[str, float]
) -> None:
    samples = await engine.generate(ask("x", PROMPTS[0], count=8, seed=3, **filters))
    assert len({s.tokens.tobytes() for s in samples}) > 1
    for sample in samples:
        expected = reference.logprobs(PROMPTS[0], sample, **filters)
        assert sample.logprobs.dtype == np.float32
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)


async def test_requests_with_different_filters_share_a_batch(
    engine: Engine, reference: Reference
) -> None:
    kinds = [{}, {"top_k": 2}, {"greedy": True}, {"top_p": 0.5, "temperature": 2.0}]
    answers = await asyncio.gather(
        *(engine.generate(ask(f"m{i}", PROMPTS[1], seed=i, **k)) for i, k in enumerate(kinds))
    )
    for kind, (sample,) in zip(kinds, answers, strict=True):
        plain = {k: v for k, v in kind.items() if k != "greedy"}
        expected = reference.logprobs(PROMPTS[1], sample, **plain)
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)


async def test_joining_late_and_leaving_early_disturbs_nobody(engine: Engine) -> None:
    """More sequences than slots, unequal lengths: rows join, leave and move all the time."""
    before = engine.stats().samples
    alone = [await engine.generate(ask(f"s{i}", p, count=3, seed=i)) for i, p in enumerate(PROMPTS)]
    first = [
        asyncio.create_task(engine.generate(ask(f"j{i}", p, count=3, seed=i)))
        for i, p in enumerate(PROMPTS)
    ]
    noise = [
        asyncio.create_task(
            engine.generate(
                ask(f"n{i}", PROMPTS[i % 4], count=9, seed=99 + i, max_tokens=1 + i % 7)
            )
        )
        for i in range(30)
    ]
    together = await asyncio.gather(*first)
    await asyncio.gather(*noise)
    for one, other in zip(alone, together, strict=True):
        assert all(same(x, y) for x, y in zip(one, other, strict=True))
    stats = engine.stats()
    assert stats.running == stats.waiting == 0
    assert stats.samples - before == 12 + 12 + 270


async def test_max_tokens_and_end_of_sequence(engine: Engine) -> None:
    samples = await engine.generate(ask("x", PROMPTS[0], count=60, max_tokens=5, seed=1))
    kinds = set()
    for sample in samples:
        ended = sample.tokens[-1] == 2
        kinds.add(bool(ended))
        assert 2 not in sample.tokens[:-1]
        assert sample.finish is (Finish.STOP if ended else Finish.LENGTH)
        assert len(sample.tokens) <= 5 and (ended or len(sample.tokens) == 5)
        assert sample.versions == ((engine.version, len(sample.tokens)),)
    assert kinds == {True, False}


async def test_an_end_token_is_no_stop_string_at_the_limit_or_before(
    engine: Engine, model_path: Path
) -> None:
    text = PromptTokenizer(tiny_config(model_path)).decode_all([2])
    samples = await engine.generate(
        ask("x", PROMPTS[0], count=60, max_tokens=3, seed=1, stop=(text,))
    )
    ended = [sample for sample in samples if sample.tokens[-1] == 2]
    assert {len(sample.tokens) == 3 for sample in ended} == {True, False}
    assert {(sample.finish, sample.stop) for sample in ended} == {(Finish.STOP, None)}


async def test_stop_strings_end_a_completion(engine: Engine, reference: Reference) -> None:
    free = await engine.generate(ask("free", PROMPTS[0], count=40, seed=5))
    cut = await engine.generate(ask("cut", PROMPTS[0], count=40, seed=5, stop=("7", "34")))
    stopped = 0
    for whole, short in zip(free, cut, strict=True):
        tokens = whole.tokens.tolist()
        ends = [
            i + 1
            for i, t in enumerate(tokens)
            if t == 10 or tokens[max(i - 1, 0) : i + 1] == [6, 7]
        ]
        expected = tokens[: min(ends)] if ends else tokens
        assert short.tokens.tolist() == expected
        assert (short.stop in ("7", "34")) == bool(ends)
        stopped += bool(ends)
        if ends:
            assert short.finish is Finish.STOP
    assert stopped > 5


async def test_weights_change_between_two_tokens_and_requests_go_on(
    engine: Engine, reference: Reference, other_path: Path
) -> None:
    """Tokens before the swap follow the old weights; those after are tagged, and follow the new
    weights over the cache that the old ones wrote."""
    first, second = engine.version + 1, engine.version + 2
    await engine.load_weights(first, dict(reference.model.named_parameters()))
    target = Reference(other_path)
    answering = asyncio.create_task(
        engine.generate(ask("long", PROMPTS[0], count=48, seed=2, max_tokens=400))
    )
    await until(engine, answering, 60)
    pause = await engine.load_weights(second, dict(target.model.named_parameters()))
    assert 0 <= pause < 1 and engine.version == second
    fresh = await engine.generate(ask("fresh", PROMPTS[1], count=2, seed=4))
    samples = await answering
    assert any(len(s.versions) == 2 for s in samples)
    for sample in samples:
        assert sum(length for _, length in sample.versions) == len(sample.tokens)
        old = sample.versions[0][1] if sample.versions[0][0] == first else 0
        before = Completion(sample.tokens[:old], sample.logprobs[:old], (), Finish.LENGTH)
        np.testing.assert_allclose(
            before.logprobs, reference.logprobs(PROMPTS[0], before), atol=1e-4
        )
        if len(sample.versions) == 2:
            after = _over_old_cache(reference, target, PROMPTS[0], sample.tokens.tolist(), old)
            np.testing.assert_allclose(sample.logprobs[old:], after, atol=1e-4)
    for sample in fresh:
        assert sample.versions == ((second, len(sample.tokens)),)
        expected = target.logprobs(PROMPTS[1], sample)
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)


def _over_old_cache(
    old: Reference, new: Reference, prompt: list[int], tokens: list[int], swapped: int
) -> list[float]:
    """Log-probs of tokens[swapped:] with new weights over the cache of the old ones."""
    with torch.inference_mode():
        # The last old token had been drawn but not fed when the weights changed.
        out = old.model(input_ids=torch.tensor([[*prompt, *tokens[: swapped - 1]]]), use_cache=True)
        cache = out.past_key_values
        result = []
        for fed, drawn in zip(tokens[swapped - 1 : -1], tokens[swapped:], strict=True):
            out = new.model(input_ids=torch.tensor([[fed]]), past_key_values=cache, use_cache=True)
            result.append(torch.log_softmax(out.logits[0, -1].float(), -1)[drawn].item())
    return result


async def test_refused_weights_change_nothing(engine: Engine, reference: Reference) -> None:
    weights = {name: p.clone() for name, p in reference.model.named_parameters()}
    version = engine.version + 1
    await engine.load_weights(version, weights)
    expected = await engine.generate(ask("a", PROMPTS[0], count=2, seed=1))
    name = next(n for n in weights if n.endswith("q_proj.weight"))
    changed = {n: torch.zeros_like(p) for n, p in weights.items()}
    for bad, words in (
        ({n: p for n, p in changed.items() if n != name}, "missing"),
        ({**changed, "model.layers.9.weight": torch.zeros(1)}, "unknown"),
        ({**changed, name: torch.zeros(3, 3)}, "shape"),
        (
            {**changed, "lm_head.weight": torch.ones_like(weights["model.embed_tokens.weight"])},
            "tied",
        ),
    ):
        with pytest.raises(WeightMismatch, match=words):
            await engine.load_weights(version + 1, bad)
    assert engine.version == version
    again = await engine.generate(ask("b", PROMPTS[0], count=2, seed=1))
    assert all(same(x, y) for x, y in zip(expected, again, strict=True))


async def test_tied_weights_may_come_under_either_name(engine: Engine, other_path: Path) -> None:
    target = Reference(other_path)
    weights = dict(target.model.named_parameters())
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    await engine.load_weights(engine.version + 1, weights)
    (sample,) = await engine.generate(ask("a", PROMPTS[0], greedy=True))
    assert sample.tokens.tolist() == target.greedy(PROMPTS[0], MAX_TOKENS)


async def test_abort_ends_a_request_and_its_samples_go_on_elsewhere_as_if_never_cut(
    engine: Engine, reference: Reference
) -> None:
    whole = await engine.generate(ask("w", PROMPTS[2], count=4, seed=8, max_tokens=300))
    cutting = asyncio.create_task(
        engine.generate(ask("cut", PROMPTS[2], count=4, seed=8, max_tokens=300))
    )
    await until(engine, cutting, 12)
    engine.abort("cut")
    engine.abort("no such request")
    with pytest.raises(Aborted) as aborted:
        await cutting
    partial = aborted.value.partial
    assert len(partial) == 4
    assert any(p is not None and p.finish is Finish.PARTIAL for p in partial)
    again = await engine.generate(
        ask("again", PROMPTS[2], count=4, seed=8, max_tokens=300, prefixes=partial)
    )
    assert engine.stats().running == 0
    if engine.exact_continuation:
        assert all(same(x, y) for x, y in zip(whole, again, strict=True))
    for begun, sample in zip(partial, again, strict=True):
        kept = 0 if begun is None else len(begun.tokens)
        assert kept == 0 or sample.tokens[:kept].tolist() == begun.tokens.tolist()
        assert sample.versions == ((engine.version, len(sample.tokens)),)
        expected = reference.logprobs(PROMPTS[2], sample)
        np.testing.assert_allclose(sample.logprobs, expected, atol=1e-4)


async def test_a_greedy_completion_that_was_cut_ends_as_if_never_cut(engine: Engine) -> None:
    (whole,) = await engine.generate(ask("w", PROMPTS[0], greedy=True, max_tokens=300))
    for cut in (1, len(whole.tokens) // 2):
        begun = Completion(
            whole.tokens[:cut], whole.logprobs[:cut], ((engine.version, cut),), Finish.PARTIAL
        )
        (again,) = await engine.generate(
            ask(f"a{cut}", PROMPTS[0], greedy=True, max_tokens=300, prefixes=(begun,))
        )
        assert same(whole, again)


async def test_a_stop_string_is_found_across_the_end_of_a_prefix(engine: Engine) -> None:
    """It begins with the prefix's last token; nothing before it is such a string, and nothing is
    generated after it. One that only begins there costs nothing."""
    (whole,) = await engine.generate(ask("w", PROMPTS[0], seed=6, max_tokens=40, greedy=True))
    digits = "0123456789s="
    pairs = [(int(a), int(b)) for a, b in pairwise(whole.tokens)]
    pair = max(i for i, p in enumerate(pairs) if min(p) >= 3 and p not in pairs[:i])
    stop = "".join(digits[t - 3] for t in pairs[pair])
    begun = Completion(
        whole.tokens[: pair + 1],
        whole.logprobs[: pair + 1],
        ((engine.version, pair + 1),),
        Finish.PARTIAL,
    )
    params = {"greedy": True, "max_tokens": 40, "prefixes": (begun,)}
    before = engine.stats().tokens
    (sample,) = await engine.generate(ask("s", PROMPTS[0], stop=(stop,), **params))
    assert sample.stop == stop and sample.finish is Finish.STOP
    assert sample.tokens.tolist() == whole.tokens[: pair + 2].tolist()
    assert engine.stats().tokens == before + 1
    (sample,) = await engine.generate(ask("t", PROMPTS[0], stop=(f"{stop[0]}?",), **params))
    assert same(sample, whole)


async def test_a_finished_sample_is_told_while_others_of_its_request_run(engine: Engine) -> None:
    (whole,) = await engine.generate(ask("w", PROMPTS[0], seed=6, max_tokens=4))
    over: list[str] = []
    first = asyncio.Event()

    def tell(request_id: str) -> None:
        over.append(request_id)
        first.set()

    engine.completion_finished = tell
    begun = Completion(whole.tokens, whole.logprobs, whole.versions, Finish.STOP)
    both = asyncio.create_task(
        engine.generate(
            ask("x/1", PROMPTS[0], count=2, seed=9, max_tokens=400, prefixes=(begun, None))
        )
    )
    await asyncio.wait_for(first.wait(), 60)
    assert over == ["x/1"] and not both.done()
    await both
    assert over == ["x/1"] * 2
    engine.completion_finished = Engine.completion_finished


async def test_a_cancelled_caller_frees_its_rows(engine: Engine) -> None:
    waiting = asyncio.create_task(engine.generate(ask("x", PROMPTS[0], count=64, max_tokens=400)))
    await until(engine, waiting, 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await engine.generate(ask("y", PROMPTS[0], max_tokens=2))
    assert engine.stats().running == 0


async def test_weights_that_are_not_finite_fail_requests_and_leave_no_trace(
    engine: Engine, reference: Reference
) -> None:
    good = {name: p.clone() for name, p in reference.model.named_parameters()}
    version = engine.version + 1
    await engine.load_weights(version, good)
    expected = await engine.generate(ask("a", PROMPTS[0], count=8, seed=1))
    await engine.load_weights(
        version + 1, {n: torch.full_like(p, torch.nan) for n, p in good.items()}
    )
    with pytest.raises(GenerationFailed):
        await engine.generate(ask("nan", PROMPTS[2], count=8))
    await engine.load_weights(version + 2, good)
    again = await engine.generate(ask("b", PROMPTS[0], count=8, seed=1))
    for before, after in zip(expected, again, strict=True):
        assert before.tokens.tolist() == after.tokens.tolist()
        assert np.allclose(before.logprobs, after.logprobs, atol=1e-5)


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        (PROMPTS[0], {"max_tokens": 100_000}, "context"),
        ([13, 999_999], {}, "vocabulary"),
        ([13, -1], {}, "vocabulary"),
        (PROMPTS[0], {"stop": ("",)}, "stop string"),
        (PROMPTS[0], {"stop": (7,)}, "stop string"),
        (PROMPTS[0], {"stop": ("\ud800",)}, "stop string"),
        (PROMPTS[0], {"temperature": float("inf")}, "temperature"),
        (PROMPTS[0], {"top_k": 1 << 40}, "top_k"),
    ],
)
async def test_a_bad_request_fails_alone(
    engine: Engine, prompt: list[int], params: dict[str, Any], words: str
) -> None:
    beside = asyncio.create_task(engine.generate(ask("good", PROMPTS[0], max_tokens=100)))
    with pytest.raises(GenerationFailed, match=words):
        await engine.generate(ask("bad", prompt, **params))
    assert len(await beside) == 1


async def test_close_tells_whoever_waits(model_path: Path) -> None:
    engine = make_test_engine("fused", tiny_config(model_path, max_tokens=400))
    await engine.start()
    waiting = asyncio.create_task(engine.generate(ask("x", PROMPTS[0], count=8, max_tokens=400)))
    failed = asyncio.create_task(engine.until_failure())
    await until(engine, waiting, 1)
    await engine.close()
    with pytest.raises((Aborted, EngineError)):
        await waiting
    for _ in range(5):
        await asyncio.sleep(0)
    assert not failed.done(), "one that is closed has not failed"
    failed.cancel()
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(ask("y", PROMPTS[0]))


async def test_an_engine_that_fails_in_a_swap_tells_whoever_waits(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(pairs: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(transformers_engine, "copy_parts", fail)
    engine = make_test_engine("fused", tiny_config(model_path))
    await engine.start()
    noticed = asyncio.create_task(engine.until_failure())
    weights = Reference(model_path).model.state_dict()
    with pytest.raises(EngineError, match="device lost"):
        await asyncio.wait_for(engine.load_weights(1, weights), 60)
    with pytest.raises(EngineError, match="device lost"):
        await asyncio.wait_for(noticed, 60)
    with pytest.raises(EngineError, match="device lost"):
        await engine.generate(ask("x", PROMPTS[0]))
    assert engine.version == -1
    await engine.close()


@pytest.mark.parametrize("kind", ["fused", "general"])
async def test_a_parked_engine_has_no_memory_and_goes_on_with_the_weights_it_is_given(
    kind: str, model_path: Path, reference: Reference
) -> None:
    """What it was generating comes back as far as it was, and is continued as if nothing were."""
    engine = make_test_engine(kind, tiny_config(model_path, turns=True, max_tokens=400))
    assert engine.stats().tokens == 0  # it is asked before it has started
    await engine.start()
    weights = dict(reference.model.named_parameters())
    await engine.load_weights(3, weights)
    request = ask("a", PROMPTS[0], count=2, max_tokens=40)
    (whole, _) = await engine.generate(request)
    running = asyncio.create_task(engine.generate(ask("b", PROMPTS[0], count=2, max_tokens=40)))
    await until(engine, running, 10)
    await engine.park()
    with pytest.raises(Aborted) as aborted:
        await running
    partial = aborted.value.partial
    held = {p.untyped_storage().nbytes() for p in engine._weights}  # type: ignore[attr-defined]
    assert held == {0} and engine.version == -1 and partial[0] is not None
    assert engine._scheduler._cache.keys.numel() == 0  # type: ignore[attr-defined]
    await engine.unpark()
    assert engine.version == -1
    await engine.load_weights(3, weights)
    (continued, _) = await engine.generate(
        ask("b", PROMPTS[0], count=2, max_tokens=40, prefixes=partial)
    )
    assert same(continued, whole) and engine.version == 3
    await engine.close()
