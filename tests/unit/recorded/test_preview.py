"""The first recorded row as the checks before a start show it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.dataset.recorded_preview import row_text
from paceline_launcher.cli import app
from tests.fixtures.chat_model import CHAT, FORGETFUL, PLAIN, encoder_of, make_chat_model
from tests.fixtures.configs import config_of
from tests.fixtures.preflight import INPUTS, findings_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("models") / "plain", PLAIN)


def test_the_turns_of_the_assistant_are_marked_and_the_rest_is_not(model: Path) -> None:
    encoder = encoder_of(model, messages_field="m")
    text = row_text(encoder.encode({"m": CHAT}), encoder._tokenizer)
    assert text.splitlines() == [
        "what is trained is between ⟦ and ⟧; a turn ends with '<eos>'",
        "prompt, 22 tokens: [user]2+2<eos>",
        "    [assistant]",
        "completion, 29 tokens, 4 trained: ⟦4<eos>⟧",
        "    [user]and 1<eos>",
        "    [assistant]⟦5<eos>⟧",
    ]


@pytest.mark.heavy
def test_the_check_of_a_configuration_shows_it(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "pairs.jsonl"
    data.write_text(json.dumps({"prompt": "1+1=", "better": "2", "worse": "11"}) + "\n")
    config = tmp_path / "run.toml"
    config.write_text(
        f'[model]\npath = "{model}"\ndevice = "cpu"\n'
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
