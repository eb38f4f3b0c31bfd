"""A tokenizer that cannot be used is bad input of the run, not of its rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_worker.tokenizer import PromptTokenizer, TokenizerError
from testbed.tiny_model import make_tiny_model
from tests.fixtures.environment_fixture import stage_config


def test_a_model_directory_without_its_tokenizer_is_named(tmp_path: Path) -> None:
    """transformers makes an empty one: every prompt of the data set would have been to blame."""
    model = make_tiny_model(tmp_path / "model", hidden=32)
    assert len(PromptTokenizer(stage_config(model)).prompt({"prompt": "s21="}).tokens) == 4
    for file in model.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(TokenizerError, match=r"there is no tokenizer in .*/model: save it there"):
        PromptTokenizer(stage_config(model))
