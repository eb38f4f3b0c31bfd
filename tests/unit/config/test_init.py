"""``paceline init`` writes what ``load_config`` takes, and what the algorithm asks for."""

import io
import json
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from typer.testing import CliRunner, Result

from paceline.config.changes import flat_settings
from paceline.config.load import load_config
from paceline.config.template import ALGORITHMS, SIZES, template_settings
from paceline.errors import BadInput
from paceline_launcher.cli import app
from paceline_launcher.preflight import user_code
from paceline_launcher.preflight.earlier_run import config_warnings
from tests.fixtures.preflight import INPUTS, findings_of

ROOT = Path(__file__).resolve().parents[3]


def init(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["init", *arguments])


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_choice_is_a_valid_configuration(
    tmp_path: Path, algorithm: str, size: str, lora: bool
) -> None:
    out = tmp_path / "new" / "run.toml"
    flags = ["--lora"] if lora else []
    done = init("--algorithm", algorithm, "--size", size, *flags, str(out))
    assert done.exit_code == 0, done.output
    config = load_config(out)
    values = config.model_dump(mode="json")
    for name, value in flat_settings(template_settings(algorithm, size, lora=lora)):
        section, *tables, field = name.split(".")
        fields = values[section]
        for table in tables:
            fields = fields[table]
        assert fields[field] == value, name
    whole = template_settings(algorithm, size)["train"]["optimizer"]["lr"]
    factor = (2.5 if size == "tiny" else 10) if lora else 1
    assert config.train.optimizer.lr == pytest.approx(whole * factor)
    assert (config.model.lora is not None) == lora
    assert config.recorded == (algorithm in RECORDED)
    assert next(iter(config_warnings(config))).state == "ok"
    assert str(out) in out.read_text(), "the commands name the file"


RECORDED = ("sft", "dpo", "reward_model")


def tried_here(check: str, name: str, **given: Any) -> user_code.Tried:
    """The check as a function: a process of its own would import torch first."""
    asked, said = json.dumps({"name": name, **given}), io.TextIOWrapper(io.BytesIO())
    with patch("sys.stdin", io.StringIO(asked)), patch("sys.stdout", said):
        assert import_module(check).main() == 0
    said.seek(0)
    return user_code.Tried("", said.read().splitlines())


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "online_dpo", *RECORDED])
def test_the_tiny_one_starts_as_it_is(
    algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    if algorithm in RECORDED:  # in a process: tests/unit/recorded/test_encoding.py
        monkeypatch.setattr(user_code, "try_import", tried_here)
    out = tmp_path / "run.toml"
    assert init("--algorithm", algorithm, str(out)).exit_code == 0
    assert {check.state for check in findings_of(load_config(out), *INPUTS)} == {"ok"}
    assert ("[reward]" in out.read_text()) == (algorithm not in RECORDED)


def test_a_file_that_is_there_is_kept_unless_forced(tmp_path: Path) -> None:
    out = tmp_path / "run.toml"
    out.write_text("mine")
    refused = init(str(out))
    assert isinstance(refused.exception, BadInput)
    assert "--force" in str(refused.exception)
    assert out.read_text() == "mine"
    assert init("--force", str(out)).exit_code == 0
    assert load_config(out).run.name == "tiny"


def test_the_tiny_one_is_refused_where_its_model_and_data_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for out in ("new/run.toml", "-"):
        refused = init(out)
        assert isinstance(refused.exception, BadInput)
        assert "root of the repository" in str(refused.exception)
    assert list(tmp_path.iterdir()) == []
    assert init("--size", "small", "new/run.toml").exit_code == 0


def test_standard_output_gets_the_configuration_alone(tmp_path: Path) -> None:
    done = init("--algorithm", "dapo", "-")
    out = tmp_path / "run.toml"
    out.write_text(done.output)
    assert load_config(out).train.loss.clip_high == 0.28
