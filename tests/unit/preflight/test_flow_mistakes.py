"""Mistakes in the config or data of a training flow: ``paceline config check`` names each, with the
remedy."""

import json
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from typer.testing import CliRunner

from paceline_launcher.cli import app
from testbed.tiny_model import make_tiny_model

PAIRS = {"chosen_field": "chosen", "rejected_field": "rejected"}
RECORDED = {"source": "recorded"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("files")
    make_tiny_model(root / "model", hidden=32)
    rows = {
        "prompts": {"prompt": "s21=", "answer": "12"},
        "halves": {"prompt": "s21=", "chosen": "12"},
        "equal": {"prompt": "s21=", "chosen": "12", "rejected": "12"},
    }
    for name, row in rows.items():
        (root / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    return root


MISTAKES: list[tuple[str, dict[str, dict[str, Any]], str]] = [
    (
        "halves",
        {"train": {"algorithm": "reward_model"}, "data": PAIRS, "rollout": RECORDED},
        "no field 'rejected'; fields of every row: prompt, chosen. Set data.rejected_field",
    ),
    (
        "equal",
        {"train": {"algorithm": "dpo"}, "data": PAIRS, "rollout": RECORDED},
        "chosen and rejected are equal: the pair says nothing",
    ),
    (
        "prompts",
        {"train": {"algorithm": "online_dpo"}, "rollout": {"group_size": 1}},
        "rollout.group_size = 1: set it to 2 or more",
    ),
    ("prompts", {"rollout": {"max_tokens": 1 << 17}}, "Lower it below"),
]


@pytest.mark.parametrize(("data", "sections", "said"), MISTAKES)
def test_a_mistake_is_named_with_the_remedy(
    data: str, sections: dict[str, dict[str, Any]], said: str, files: Path, tmp_path: Path
) -> None:
    settings: dict[str, dict[str, Any]] = {
        "model": {"path": str(files / "model"), "device": "cpu"},
        "data": {"path": str(files / f"{data}.jsonl"), **sections.get("data", {})},
        **{name: fields for name, fields in sections.items() if name != "data"},
    }
    config = tmp_path / "run.toml"
    config.write_text(tomli_w.dumps(settings))
    refused = CliRunner().invoke(app, ["config", "check", str(config)])
    assert refused.exit_code != 0
    assert said in " ".join(str(refused.exception).split())
