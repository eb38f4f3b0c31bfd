"""Evaluation sets as a configuration names them."""

from pathlib import Path

import pytest

from paceline.config.load import fleet_digest, load_config
from paceline.config.schema import Config

BASE = """
[model]
path = "m"
[data]
path = "train.jsonl"
eval_path = "held_out.jsonl"
"""
MATH = '[evaluation.sets.math]\npath = "math.jsonl"\n'


def load(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "run.toml"
    path.write_text(BASE + text)
    return load_config(path)


def test_one_sample_is_greedy_unless_it_is_said_how_to_draw_it(tmp_path: Path) -> None:
    more = (
        '[evaluation.sets.k]\npath="x"\nsamples = 4\n[evaluation.sets.t]\npath="x"\ntop_p = 0.9\n'
    )
    sets = load(tmp_path, MATH + more).evaluation.sets
    assert {name: each.is_greedy for name, each in sets.items()} == {
        "math": True,
        "k": False,
        "t": False,
    }


def test_sets_are_part_of_what_the_fleet_shares(tmp_path: Path) -> None:
    config = load(tmp_path, "")
    assert fleet_digest(load(tmp_path, MATH))[0] != fleet_digest(config)[0]


@pytest.mark.parametrize(
    ("reward", "vote"),
    [
        ("math_verify", "math"),
        ("math_boxed", "boxed"),
        ("math_boxed:intervals", "boxed"),
        ("exact_match", "text"),
    ],
)
def test_samples_vote_on_what_the_reward_reads(tmp_path: Path, reward: str, vote: str) -> None:
    config = load(tmp_path, MATH + f'samples = 8\nreward = ["{reward}"]\n')
    (each,) = config.evaluation.sets.values()
    assert each.votes(config.reward) == vote
