"""The doors of evaluation sets: errors name the setting and the remedy, and a run without sets is
as before."""

from pathlib import Path

import pytest

from paceline.config.load import ConfigError, fleet_digest, load_config
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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '[evaluation]\nbest_metric = "maths/reward"\n' + MATH,
            ["no set 'maths'", "held_out, math"],
        ),
        ('[evaluation]\nbest_metric = "math/pass@3"\n' + MATH, ["samples = 1", "math/pass@1"]),
        ('[evaluation]\nbest_metric = "math/tokens"\n' + MATH, ["no such metric", "math/reward"]),
        ('[evaluation]\nbest_metric = "reward"\n' + MATH, ["no set 'reward'", "SET/METRIC"]),
        (MATH + "samples = 4\ngreedy = true\n", ["evaluation.sets.math", "equal", "samples = 1"]),
        (MATH + "temperature = 0.5\n", ["temperature has no effect", "greedy = false"]),
        (MATH + "sampels = 4\n", ["line 9", "evaluation.sets.math.sampels", "math.samples?"]),
        ('[evaluation.sets.held_out]\npath = "x"\n', ["data.eval_path is the set of that name"]),
        (
            'prompt_template = "{q}"\n' + MATH + 'prompt_field = "q"\n',
            ["evaluation.sets.math.prompt_field", "data.prompt_template"],
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, text)
    assert all(word in str(refused.value) for word in words), refused.value
    assert "\n" not in str(refused.value)


def test_a_metric_without_any_evaluation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(BASE.replace("eval_path", "#") + '[evaluation]\nbest_metric = "a/reward"\n')
    with pytest.raises(ConfigError, match=r"no evaluation. Set data.eval_path"):
        load_config(path)


def test_samples_are_greedy_only_if_there_is_one(tmp_path: Path) -> None:
    sets = load(tmp_path, MATH + '[evaluation.sets.k]\npath="x"\nsamples = 4\n').evaluation.sets
    assert (sets["math"].is_greedy, sets["k"].is_greedy) == (True, False)


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
