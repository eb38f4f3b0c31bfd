"""Tokens of recorded rows: what is trained, whatever the chat template does, and how it shows."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.dataset.recorded_encoding import RowEncoder
from paceline.dataset.recorded_preview import row_text
from paceline.prompt_tokenizer import BadPrompt
from paceline.v1 import rollout_pb2
from paceline_launcher.cli import app
from tests.fixtures.chat_model import (
    CHAT,
    FORGETFUL,
    MARKED,
    PLAIN,
    encoder_of,
    make_chat_model,
    trained_ids,
)
from tests.fixtures.configs import config_of
from tests.fixtures.preflight import INPUTS, findings_of


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    templates = {"plain": PLAIN, "marked": MARKED, "forgetful": FORGETFUL}
    return {name: make_chat_model(root / name, text) for name, text in templates.items()}


def shown(encoder: RowEncoder, completion: rollout_pb2.Completion) -> tuple[str, str]:
    """The text, and the text of the trained tokens alone."""
    return completion.text, encoder.tokenizer.decode_all(trained_ids(completion))


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


def test_the_turns_of_the_assistant_are_marked_and_the_rest_is_not(models: dict[str, Path]) -> None:
    encoder = encoder_of(models["plain"], messages_field="m")
    text = row_text(encoder.encode({"m": CHAT}), encoder.tokenizer)
    assert text.splitlines() == [
        "what is trained is between ⟦ and ⟧; a turn ends with '<eos>'",
        "prompt, 22 tokens: [user]2+2<eos>",
        "    [assistant]",
        "completion, 29 tokens, 4 trained: ⟦4<eos>⟧",
        "    [user]and 1<eos>",
        "    [assistant]⟦5<eos>⟧",
    ]


@pytest.mark.heavy
def test_the_check_of_a_configuration_shows_it(models: dict[str, Path], tmp_path: Path) -> None:
    data = tmp_path / "pairs.jsonl"
    data.write_text(json.dumps({"prompt": "1+1=", "better": "2", "worse": "11"}) + "\n")
    config = tmp_path / "run.toml"
    config.write_text(
        f'[model]\npath = "{models["plain"]}"\ndevice = "cpu"\n'
        f'[data]\npath = "{data}"\nchosen_field = "better"\nrejected_field = "worse"\n'
        '[train]\nalgorithm = "dpo"\n[rollout]\nsource = "recorded"\n'
    )
    done = CliRunner().invoke(app, ["config", "check", str(config)])
    assert done.exit_code == 0, done.output
    assert "first row: what is trained is between ⟦ and ⟧" in done.stderr
    assert "    rejected, 3 tokens, 3 trained: ⟦11<eos>⟧" in done.stderr
    assert "⟦" not in done.stdout


@pytest.mark.heavy
def test_a_template_that_drops_every_row_is_found_before_the_start(tmp_path: Path) -> None:
    """The fields are there; only a tokenizer can tell."""
    template = FORGETFUL.replace("m.role == 'assistant'", "m.role == 'assistant' and not loop.last")
    model = make_chat_model(tmp_path / "forgetful", template)
    thought = [CHAT[0], {"role": "assistant", "content": "hm|4"}, *CHAT[2:]]
    data = tmp_path / "chats.jsonl"
    data.write_text(json.dumps({"m": thought}) + "\n")
    config = config_of(
        model={"path": str(model), "device": "cpu"},
        data={"path": str(data), "messages_field": "m"},
        train={"algorithm": "sft"},
        rollout={"source": "recorded"},
    )
    checks = findings_of(config, *INPUTS)
    (found,) = [check for check in checks if check.state != "ok"]
    assert found.state == "fail"
    assert (
        "would be dropped (malformed_row)" in found.found and "one row for each turn" in found.found
    )
