"""The examples of environments: their configurations are valid, what their scripts write fits
them."""

from pathlib import Path

import pytest

from examples.environments import guess_digit, make_data
from examples.environments.guess_number import HIGHER, LOWER, UNCLEAR
from paceline.config.load import load_config
from paceline.dataset.rows import load_rows
from paceline.dataset.training_rows import check_rows
from paceline.prompt_tokenizer import PromptTokenizer

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


@pytest.mark.parametrize(("game", "players"), [("guess_digit", 1), ("two_digits", 2)])
def test_what_the_small_games_are_made_of_fits_their_configurations(
    tmp_path: Path, game: str, players: int
) -> None:
    guess_digit.make(tmp_path)
    config = load_config(
        HERE / f"{game}.toml",
        [f'model.path="{tmp_path}/model"', f'data.path="{tmp_path}/train.jsonl"'],
    )
    rows = load_rows(config.data.path)
    check_rows(rows, config.data)
    tokenizer = PromptTokenizer(config)
    turns = config.rollout.max_turns // players
    assert 2**turns > 10, "it can be won"
    longest = len(tokenizer.prompt(rows[0]).tokens) + turns
    for hint in (HIGHER, LOWER, UNCLEAR):
        tokens = tokenizer.encode(f"\n{hint}\n")
        assert tokenizer.decode_all(tokens) == f"\n{hint}\n", "every character is a token"
    longest += (turns - 1) * len(tokenizer.encode(f"\n{UNCLEAR}\n"))
    assert longest <= (config.rollout.max_context or 0), "no game is cut"
