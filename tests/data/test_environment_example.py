"""The example of an environment: its configuration is valid and its data is what its script writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.environments import make_data
from paceline.config.load import load_config
from paceline.data import check_rows, load_rows

HERE = Path(make_data.__file__).parent


def test_the_checked_in_data_is_what_its_script_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_data, "HERE", tmp_path)
    make_data.main()
    name = "guess_number.jsonl"
    assert (tmp_path / name).read_bytes() == (HERE / name).read_bytes()


def test_the_configuration_fits_its_data_and_the_game_can_be_won() -> None:
    config = load_config(HERE / "guess_number.toml")
    rows = load_rows(HERE / "guess_number.jsonl")
    check_rows(rows, config.data)
    widest = max(row["high"] - row["low"] + 1 for row in rows)
    assert 2**config.rollout.max_turns > widest
