"""Tokens of recorded rows: what is trained, whatever the chat template does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.dataset.recorded_encoding import RowEncoder
from paceline.prompt_tokenizer import BadPrompt
from paceline.v1 import rollout_pb2
from tests.fixtures.chat_model import (
    CHAT,
    FORGETFUL,
    MARKED,
    PLAIN,
    encoder_of,
    make_chat_model,
    trained_ids,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    templates = {"plain": PLAIN, "marked": MARKED, "forgetful": FORGETFUL}
    return {name: make_chat_model(root / name, text) for name, text in templates.items()}


def shown(encoder: RowEncoder, completion: rollout_pb2.Completion) -> tuple[str, str]:
    """The text, and the text of the trained tokens alone."""
    return completion.text, encoder._tokenizer.decode_all(trained_ids(completion))


@pytest.mark.parametrize("model", ["plain", "marked"])
def test_only_the_turns_of_the_assistant_are_trained(models: dict[str, Path], model: str) -> None:
    rows = encoder_of(models[model], messages_field="messages")
    row = rows.encode({"messages": CHAT})
    assert row.prompt_text == "[user]2+2<eos>\n[assistant]"
    whole, trained = shown(rows, row.completions[0])
    assert whole == "4<eos>\n[user]and 1<eos>\n[assistant]5<eos>"
    assert trained == "4<eos>5<eos>"


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_arguments_of_the_chat_template_reach_recorded_chats(tmp_path: Path, template: str) -> None:
    model = make_chat_model(tmp_path / "model", "{% if loud %}LOUD {% endif %}" + template)
    rows = encoder_of(model, messages_field="messages", chat_template_args={"loud": True})
    row = rows.encode({"messages": CHAT})
    assert row.prompt_text == "LOUD [user]2+2<eos>\n[assistant]"
    assert shown(rows, row.completions[0])[1] == "4<eos>5<eos>"


def test_a_template_that_rewrites_past_turns_is_refused_with_the_remedy(
    models: dict[str, Path],
) -> None:
    rows = encoder_of(models["forgetful"], messages_field="messages")
    past = [
        {**m, "content": f" {m['content']}"} for m in CHAT
    ]  # it trims answers, so texts still agree
    assert rows.encode({"messages": past}).completions
    generous = FORGETFUL.replace("m.role == 'assistant'", "m.role == 'assistant' and not loop.last")
    path = make_chat_model(models["forgetful"].parent / "generous", generous)
    rows = encoder_of(path, messages_field="messages")
    thought = [*CHAT[:1], {"role": "assistant", "content": "hm|4"}, *CHAT[2:]]
    with pytest.raises(BadPrompt, match="one row for each turn") as caught:
        rows.encode({"messages": thought})
    assert caught.value.reason == "malformed_row"
    answer = {"prompt": CHAT[:3], "last": "hm|5"}
    rows = encoder_of(path, completion_field="last")
    assert rows.encode(answer).completions[0].text == "hm|5<eos>"


def test_a_text_gets_one_end_and_all_of_it_is_trained(models: dict[str, Path]) -> None:
    rows = encoder_of(models["plain"], completion_field="answer")
    for answer in ("4", "4<eos>"):
        row = rows.encode({"prompt": "2+2=", "answer": answer})
        assert shown(rows, row.completions[0]) == ("4<eos>", "4<eos>")


def test_both_completions_of_a_pair_follow_the_same_tokens(models: dict[str, Path]) -> None:
    rows = encoder_of(models["plain"], chosen_field="good", rejected_field="bad", margin_field="by")
    group = rows.encode({"good": CHAT[:2], "bad": [CHAT[0], CHAT[3]], "by": 2.5})
    assert [c.reward for c in group.completions] == [2.5, 0.0]
    assert [c.text for c in group.completions] == ["4<eos>", "5<eos>"]
    assert group.prompt_text == "[user]2+2<eos>\n[assistant]"
    for completion in group.completions:
        assert completion.logprobs == bytes(len(completion.tokens))
        assert [(s.version, s.length) for s in completion.versions] == [
            (0, len(completion.tokens) // 4)
        ]
        assert completion.loss_mask == b""


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "1" * 9, "answer": "2"}, "prompt_too_long"),
        ({"prompt": "1" * 8, "answer": "2" * 8}, "row_too_long"),
        ({"prompt": "1", "answer": ""}, "malformed_row"),
        ({"prompt": "1"}, "malformed_row"),
    ],
)
def test_an_unusable_row_has_a_reason(
    models: dict[str, Path], row: dict[str, Any], reason: str
) -> None:
    rollout = {"max_tokens": 8}
    rows = encoder_of(models["plain"], rollout, completion_field="answer", max_prompt_tokens=8)
    with pytest.raises(BadPrompt) as caught:
        rows.encode(row)
    assert caught.value.reason == reason


@pytest.mark.parametrize("setting", ["max_position_embeddings", "n_positions"])
def test_a_row_beyond_the_positions_of_the_model_is_too_long(tmp_path: Path, setting: str) -> None:
    model = make_chat_model(tmp_path, PLAIN)
    (model / "config.json").write_text(json.dumps({setting: 12}))
    rows = encoder_of(model, {"max_tokens": 64}, completion_field="answer", max_prompt_tokens=8)
    assert rows.encode({"prompt": "1" * 4, "answer": "2" * 7})
    with pytest.raises(BadPrompt) as caught:
        rows.encode({"prompt": "1" * 4, "answer": "2" * 9})
    assert caught.value.reason == "row_too_long"
