"""A tokenizer that cannot be used is bad input of the run, not of its rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from paceline.prompt_tokenizer import BadPrompt, PromptTokenizer, TokenizerError
from rollout_worker.engine.base import Finish, Request, SamplingParams
from testbed.tiny_model import make_tiny_model
from tests.fixtures.engines import Reference, make_test_engine, tiny_config
from tests.fixtures.environment_fixture import stage_config


def test_a_model_directory_without_its_tokenizer_is_named(tmp_path: Path) -> None:
    """transformers makes an empty one: every prompt of the data set would have been to blame."""
    model = make_tiny_model(tmp_path / "model", hidden=32)
    assert len(PromptTokenizer(stage_config(model)).prompt({"prompt": "s21="}).tokens) == 4
    for file in model.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(TokenizerError, match=r"there is no tokenizer in .*/model: save it there"):
        PromptTokenizer(stage_config(model))


@pytest.mark.parametrize("end", ["", "<eos>"])
def test_tokens_and_texts_are_those_of_transformers(tmp_path: Path, end: str) -> None:
    """Calls of the library behind it take a fifth of the time."""
    model = make_tiny_model(tmp_path / "model", hidden=32)
    file = model / "tokenizer.json"
    raw = json.loads(file.read_text())
    raw["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst"}
    raw["truncation"]["stride"] = 0
    file.write_text(json.dumps(raw))
    ours, theirs = PromptTokenizer(stage_config(model)), AutoTokenizer.from_pretrained(model)
    text = f"s123={end}"
    assert ours.encode(text) == theirs(text, add_special_tokens=False).input_ids
    tokens = theirs(text).input_ids
    assert ours.prompt({"prompt": text}).tokens.tolist() == [
        t for t in tokens if t != theirs.eos_token_id
    ]
    assert ours.decode_many([np.array(tokens, np.int32)]) == theirs.batch_decode(
        [tokens], skip_special_tokens=True
    )


def test_a_tokenizer_with_code_of_its_own_is_called_by_that(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = AutoTokenizer.from_pretrained(model)

    class Shouting(type(theirs)):  # type: ignore[misc]
        def _decode(self, *arguments: Any, **named: Any) -> str:
            return f"{super()._decode(*arguments, **named)}!"

    theirs.__class__ = Shouting
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: theirs)
    tokenizer = PromptTokenizer(stage_config(model))
    tokens = np.array(tokenizer.encode("s12="), np.int32)
    assert tokenizer.decode_many([tokens]) == ["s12=!"]


def tokenizer_of(model: Path, **data: object) -> PromptTokenizer:
    config = stage_config(model)
    changed = config.data.model_validate({**config.data.model_dump(), **data})
    return PromptTokenizer(config.model_copy(update={"data": changed}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tokenizer") / "model", hidden=32)


def text_of(tokenizer: PromptTokenizer, prompt: str) -> tuple[str, int]:
    found = tokenizer.prompt({"prompt": prompt})
    assert len(found.tokens) <= tokenizer.limit
    return found.text, found.cut


def test_a_long_prompt_is_truncated_and_keeps_its_template_and_suffix(model: Path) -> None:
    limits = {"max_prompt_tokens": 6, "prompt_template": "s{prompt}", "prompt_suffix": "="}
    left = tokenizer_of(model, long_prompts="truncate_left", **limits)
    right = tokenizer_of(model, long_prompts="truncate_right", **limits)
    assert text_of(left, "12345678") == ("s5678=", 4)
    assert text_of(right, "12345678") == ("s1234=", 4)
    assert text_of(left, "1234") == ("s1234=", 0)


def test_a_prompt_too_long_without_any_of_its_text_is_dropped(model: Path) -> None:
    limits = {"max_prompt_tokens": 3, "prompt_template": "s777{prompt}"}
    tokenizer = tokenizer_of(model, long_prompts="truncate_left", **limits)
    with pytest.raises(BadPrompt, match="without any text of the row"):
        tokenizer.prompt({"prompt": "12"})
    with pytest.raises(BadPrompt, match="8 tokens, at most 6"):
        tokenizer_of(model, max_prompt_tokens=6).prompt({"prompt": "12345678"})


def test_a_suffix_that_leaves_no_room_is_refused_at_the_start(model: Path) -> None:
    with pytest.raises(
        TokenizerError, match=r"data.prompt_suffix has 4 tokens, .*max_prompt_tokens"
    ):
        tokenizer_of(model, max_prompt_tokens=4, prompt_suffix="1234")


def test_arguments_reach_the_chat_template(model: Path) -> None:
    tokenizer = tokenizer_of(model, chat_template_args={"enable_thinking": False})
    tokenizer._tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ '=' if enable_thinking else '7' }}"
    )
    assert tokenizer.prompt({"prompt": [{"role": "user", "content": "s21"}]}).text == "s217"


def test_the_longest_message_is_truncated(model: Path) -> None:
    tokenizer = tokenizer_of(model, long_prompts="truncate_right", max_prompt_tokens=6)
    tokenizer._tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    row = {"prompt": [{"role": "system", "content": "s1"}, {"role": "user", "content": "234567"}]}
    assert tokenizer.prompt(row).text == "s12345"
    assert row["prompt"][1]["content"] == "234567", "the row stays as it is"


async def test_a_model_without_end_and_padding_tokens_generates_to_the_length_limit(
    tmp_path: Path,
) -> None:
    model = make_tiny_model(tmp_path / "model", hidden=32)
    for file in "tokenizer_config.json", "config.json", "generation_config.json":
        settings = json.loads((model / file).read_text())
        names = ("eos_token", "pad_token", "eos_token_id", "pad_token_id")
        kept = {name: value for name, value in settings.items() if name not in names}
        (model / file).write_text(json.dumps(kept))
    config = tiny_config(model, max_tokens=12)
    tokenizer = PromptTokenizer(config)
    assert tokenizer.end_tokens == ()
    engine = make_test_engine("fused", config)
    await engine.start()
    try:
        weights = {name: w.detach() for name, w in Reference(model).model.named_parameters()}
        await engine.load_weights(0, weights)
        prompt = tokenizer.prompt({"prompt": "s21="}).tokens
        made = await engine.generate(Request("r", prompt, SamplingParams(12), 3))
    finally:
        await engine.close()
    assert [len(completion.tokens) for completion in made] == [12, 12, 12]
    assert {completion.finish for completion in made} == {Finish.LENGTH}
