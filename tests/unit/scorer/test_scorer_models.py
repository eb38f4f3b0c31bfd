"""Models of scorers: their numbers are those of one plain forward pass, and models that do not fit
are refused."""

import asyncio
import builtins
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from paceline.config.schema import Config
from paceline.process.parked_memory import ParkedMemory
from scorer_worker.scorer import (
    BadCompletion,
    BatchedScorer,
    Item,
    Score,
    ScorerError,
    make_scorer,
)
from testbed.patience import patient
from testbed.tiny_model import make_tiny_model, make_tiny_reward_model
from tests.fixtures import configs

PAD = 0


def config_of(model: Path, scorer: dict[str, Any], **rollout: Any) -> Config:
    path = {"path": str(model), "device": "cpu"}
    return configs.config_of(model=path, rollout=rollout, scorers={"one": scorer})


def items() -> list[Item]:
    """Unequal lengths; the last one ends with the padding token."""
    draw = np.random.default_rng(0)
    made = [
        Item(draw.integers(3, 15, p).astype(np.int32), draw.integers(3, 15, n).astype(np.int32))
        for p, n in ((3, 5), (1, 1), (6, 2), (2, 7))
    ]
    made[-1].tokens[-1] = PAD
    return made


def whole(item: Item) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([item.prompt_tokens, item.tokens]).astype("int64"))[None]


async def scores_of(config: Config) -> list[Any]:
    torch.set_num_threads(1)
    scorer = make_scorer(config, "one")
    try:
        await scorer.start()
        return await scorer.score(items())
    finally:
        await scorer.close()


async def test_a_reward_models_score_is_its_head_at_the_last_token(tmp_path: Path) -> None:
    """In batches of any size. The classifier of transformers, asked for one sequence, is the
    reference."""
    model = make_tiny_model(tmp_path / "model", hidden=32)
    path = make_tiny_reward_model(tmp_path / "rm", model)
    reference = AutoModelForSequenceClassification.from_pretrained(path)
    # It would otherwise skip a last token that is the padding token.
    reference.config.pad_token_id = 99
    expected = [reference(whole(item)).logits.item() for item in items()]
    for batch_size in (1, 3, 16):
        scorer = {"kind": "reward_model", "path": str(path), "batch_size": batch_size}
        assert await scores_of(config_of(model, scorer)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_log_probs_of_a_scorer_are_those_of_a_plain_loop(
    tmp_path: Path, temperature: float
) -> None:
    model = make_tiny_model(tmp_path / "model", hidden=32)
    reference = AutoModelForCausalLM.from_pretrained(model)
    scorer = {"kind": "logprobs", "path": str(model), "batch_size": 3}
    found = await scores_of(config_of(model, scorer, temperature=temperature))
    for item, column in zip(items(), found, strict=True):
        logits = reference(whole(item)).logits[0]
        for position, token in enumerate(item.tokens):
            row = logits[len(item.prompt_tokens) + position - 1].double() / temperature
            expected = row[int(token)] - torch.logsumexp(row, 0)
            assert column[position] == pytest.approx(expected.item(), abs=1e-5)
        assert column.dtype == np.float32
        assert len(column) == len(item.tokens)


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("kind", ["reward_model", "logprobs"])
async def test_a_scorer_without_its_turn_keeps_requests_and_comes_back_bit_for_bit(
    tmp_path: Path, kind: str, moves: bool
) -> None:
    """``moves``: as if the device had memory of its own. It loads into host memory."""
    model = make_tiny_model(tmp_path / "model", hidden=32)
    rm = make_tiny_reward_model(tmp_path / "rm", model) if kind == "reward_model" else model
    alone = config_of(model, {"kind": kind, "path": str(rm)})
    fleet = alone.fleet.model_copy(update={"sharing": "turns"})
    expected = await scores_of(alone)
    scorer: Any = make_scorer(alone.model_copy(update={"fleet": fleet}), "one")
    await scorer.start()
    for tensor in (*scorer._model.parameters(), *scorer._model.buffers()):
        tensor.data = tensor.data.clone()  # a file's mapping has no storage to empty
    scorer._memory = ParkedMemory(torch.device("cpu"), moves=moves)
    before = {name: tensor.clone() for name, tensor in scorer._model.state_dict().items()}
    for _ in range(3):
        asked = asyncio.create_task(scorer.score(items()))
        await asyncio.sleep(0)
        assert scorer.parked and not scorer.computing and not asked.done()
        await scorer.unpark()
        found = await asked
        assert all(np.array_equal(*pair) for pair in zip(found, expected, strict=True))
        await scorer.park()
        sizes = {tensor.untyped_storage().nbytes() for tensor in scorer._model.parameters()}
        assert (sizes == {0}) == moves
    await scorer.unpark()
    after = scorer._model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    await scorer.close()


async def test_a_turn_ends_between_two_batches(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", hidden=32)
    config = config_of(model, {"kind": "logprobs", "path": str(model), "batch_size": 1})
    scorer: Any = make_scorer(config, "one")
    await scorer.start()
    begun, loop, compute = asyncio.Event(), asyncio.get_running_loop(), scorer.compute

    def seen(batch: Sequence[Item]) -> list[Score]:
        loop.call_soon_threadsafe(begun.set)
        return list(compute(batch))

    scorer.compute = seen
    asked = asyncio.create_task(scorer.score(items()))
    await begun.wait()
    await scorer.park()
    assert scorer.done == 1 and not asked.done()
    await scorer.unpark()
    assert len(await asked) == len(items())
    await scorer.close()


async def test_a_prediction_head_that_the_scorer_would_skip_is_refused(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", hidden=32)
    rows = AutoModelForCausalLM.from_pretrained(model).get_input_embeddings().num_embeddings
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = AutoConfig.for_model(
        "modernbert-decoder", vocab_size=rows, num_attention_heads=2, pad_token_id=PAD, **small
    )
    other = AutoModelForCausalLM.from_config(config)
    for parameter in other.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ScorerError, match=r"scorers\.one\.path.*prediction head"):
        await scores_of(config_of(model, {"kind": "logprobs", "path": str(tmp_path / "other")}))


async def test_a_model_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", hidden=32)
    other = make_tiny_model(tmp_path / "other", vocab="9876543210s=", hidden=32)
    for scorer in (
        {"kind": "logprobs", "path": str(other)},
        {"kind": "reward_model", "path": str(make_tiny_reward_model(tmp_path / "rm", other))},
    ):
        with pytest.raises(ScorerError, match=r"scorers\.one\.path.*other tokens.*judge"):
            await scores_of(config_of(model, scorer))


@pytest.mark.parametrize(
    ("path", "said"),
    [("model", "no weights of the head"), ("none", r"scorers\.one\.path: no such directory")],
)
async def test_what_is_no_reward_model_is_refused(tmp_path: Path, path: str, said: str) -> None:
    model = make_tiny_model(tmp_path / "model", hidden=32)
    with pytest.raises(ScorerError, match=said):
        await scores_of(config_of(model, {"kind": "reward_model", "path": str(tmp_path / path)}))


async def test_one_completion_that_is_too_long_fails_alone(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", hidden=32)
    scorer = make_scorer(
        config_of(model, {"kind": "logprobs", "path": str(model), "max_context": 8}), "one"
    )
    await scorer.start()
    with pytest.raises(BadCompletion, match="have 9 tokens, and this scorer takes 8"):
        await scorer.score(items()[3:])
    strange = Item(np.array([3], np.int32), np.array([99], np.int32))
    with pytest.raises(BadCompletion, match="token 99"):
        await scorer.score([strange])
    assert len(await scorer.score(items()[:1])) == 1
    await scorer.close()


class Careless(BatchedScorer):
    """Raises the exception that a text names."""

    def load(self) -> None:
        self.limit = self.rows = 99

    def compute(self, items: Sequence[Item]) -> list[Score]:
        if items[0].text:
            raise getattr(builtins, items[0].text)
        return [1.0] * len(items)


async def test_whatever_the_code_of_a_model_raises_fails_its_own_request_alone() -> None:
    scorer = Careless(4)
    await scorer.start()
    async with asyncio.timeout(patient(30)):
        for name in ("GeneratorExit", "SystemExit", "StopIteration"):
            with pytest.raises(RuntimeError, match=name):
                await scorer.score([replace(items()[0], text=name)])
        assert await scorer.score(items()) == [1.0] * 4
    await scorer.close()
