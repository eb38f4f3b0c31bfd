"""A configuration is read whole, or refused."""

from operator import attrgetter
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import Config, ConfigError, fleet_digest, load_config, to_toml
from paceline.config.load import field_lines, unknown_setting
from paceline.config.schema import AUTO_FANOUT, SETTINGS
from tests.fixtures.configs import config_of

MINIMAL = '[model]\npath = "m"\n\n[data]\npath = "d"\n'


def kinds(annotation: object) -> set[object]:
    return {annotation}.union(*(kinds(inner) for inner in get_args(annotation)))


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text), overrides)
    return str(caught.value)


@pytest.mark.parametrize(("staleness", "age"), [(0, 8), (1, 8), (4, 32)])
def test_the_default_age_of_tokens_is_generous(tmp_path: Path, staleness: int, age: int) -> None:
    path = write(tmp_path, MINIMAL)
    config = load_config(path, [f"train.max_staleness={staleness}"])
    assert config.train.late_groups == "train" and config.train.token_age == age
    config = load_config(path, [f"train.max_staleness={staleness}", "train.max_token_age=5"])
    assert config.train.token_age == 5


def test_overrides_are_typed_values_or_plain_text_and_none_unsets(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    given = ["train.optimizer.lr=1e-4", "train.steps=7", "run.name=night"]
    config = load_config(path, [*given, 'reward.functions=["math_verify"]'])
    assert (config.train.optimizer.lr, config.train.steps) == (1e-4, 7)
    assert (config.run.name, config.reward.functions) == ("night", ["math_verify"])
    # An environment that scores needs no answers.
    unset = [
        "payloads.url=hdfs:///srv/x",
        "train.loss.tis_cap=none",
        "data.answer_field=none",
        "rollout.max_context=64",
    ]
    environment = "rollout.environment=examples.environments.guess_number:guess_number"
    config = load_config(path, [*unset, environment])
    assert config.train.loss.tis_cap is None and config.data.answer_field is None


@pytest.mark.parametrize(
    "given",
    [
        "redis.url=redis://h:port/0",
        "redis.url=redis+sentinel://a:1,b:x/m",
        "payloads.url=redis://h:",
    ],
)
def test_a_port_of_a_redis_is_a_number(tmp_path: Path, given: str) -> None:
    setting, _, url = given.partition("=")
    with pytest.raises(ConfigError, match=f"{setting}: a port is a number"):
        load_config(write(tmp_path, MINIMAL), [f"{given}x"])
    load_config(write(tmp_path, MINIMAL), [f"{setting}={url.partition(':/')[0]}://:a%2Fb@h:6379/m"])


def test_resolved_toml_reads_back_equal(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path, MINIMAL),
        [
            "train.loss.tis_cap=none",
            "train.loss.mask_ratio_token=[0.5, 2.0]",
            'reward.functions={exact_match = 1.0, "format:a\\"b" = 0.5}',
            'rollout.stop=["\\n", "é"]',
            "rollout.vllm={enforce_eager = true}",
        ],
    )
    assert load_config(write(tmp_path, f"\ufeff{to_toml(config)}")) == config


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "an empty name is not a setting. The sections are run, model"),
        ("train.optimiser", "Did you mean train.optimizer?"),
        ("nowhere." * 1000, "The sections are run, model"),
    ],
)
def test_a_name_that_is_no_setting_is_said_with_what_was_meant(name: str, said: str) -> None:
    why = unknown_setting(name)
    assert said in why and len(why) < 1000
    assert not unknown_setting("train.optimizer.lr")


NUMBERS = [n for n, info in SETTINGS.items() if {int, float} & kinds(info.annotation)]
IN_TABLES = ("rollout.vllm.x", "objective.beta", "reward.functions.exact_match", "fleet.scorers.j")


@pytest.mark.parametrize("odd", ["nan", "-inf", "1" + 40 * "0"])
def test_a_number_that_is_none_is_refused_by_the_name_of_its_setting(
    tmp_path: Path, odd: str
) -> None:
    for setting in NUMBERS if odd == "nan" else ():
        assert f": {setting} = NaN: " in refusal(tmp_path, MINIMAL, f"{setting}=nan")
    for setting in IN_TABLES:
        *path, last = setting.split(".")
        told = refusal(tmp_path, MINIMAL, f'{".".join(path)}={{"{last}"={odd}}}')
        assert "finite number" in told or "less than" in told, told


def test_every_problem_is_said_at_once(tmp_path: Path) -> None:
    said = refusal(tmp_path, MINIMAL + "[train]\nsteps = 0\nlrr = 1\n", "rollout.top_p=2")
    assert len(said.splitlines()) == 3


def test_a_run_of_another_release_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f"{MINIMAL}[rollout]\nopenai_sampling = true\nolder = 1\n")
    (tmp_path / "events.jsonl").touch()
    with pytest.raises(ConfigError, match=r"^.* line 7: rollout\.openai_sampling .*release.*one$"):
        load_config(path)


def test_a_missing_file_or_section_is_one_line(tmp_path: Path) -> None:
    assert "Add a section [model] with path" in refusal(tmp_path, '[data]\npath = "d"\n')
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "absent.toml")


def test_a_home_directory_is_known_to_every_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only to those whose library happens to expand it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    paths = ["model.path", "model.tokenizer", "data.path", "data.eval_path"]
    paths += ["train.loss.reference_path", "auth.token_file"]
    config = load_config(write(tmp_path, MINIMAL), [f"{name}=~/{name}" for name in paths])
    found = {name: attrgetter(name)(config) for name in paths}
    assert found == {name: f"{tmp_path}/{name}" for name in paths}
    assert load_config(write(tmp_path, MINIMAL), ["model.path=org/~m"]).model.path == "org/~m"


def test_lines_are_found_behind_values_over_several_lines() -> None:
    text = 'a = """\n[no.table]\nb = 1\n"""\n[t] # note\nlist = [\n  1,\n]\nc = { d = 2 }\n'
    lines = field_lines(text)
    assert lines[("t",)] == 5
    assert lines[("t", "list")] == 6
    assert lines[("t", "c", "d")] == 9
    assert ("b",) not in lines


def test_digest_covers_what_the_fleet_must_share_and_nothing_else(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    digest, canonical = fleet_digest(load_config(path, ["train.steps=7", "rollout.group_size=4"]))
    assert digest == fleet_digest(load_config(path, ["rollout.group_size=4"]))[0]
    digest = fleet_digest(load_config(path))[0]
    assert fleet_digest(load_config(path, ["fleet.rollout=3", "redis.url=redis://x"]))[0] == digest
    assert fleet_digest(load_config(path, ["train.loss.clip_low=0.1"]))[0] != digest
    assert fleet_digest(load_config(path, ["train.optimizer.lr=1e-3"]))[0] == digest
    assert '"rollout.group_size":4' in canonical and "steps" not in canonical


@given(st.text(), st.lists(st.text(min_size=1)))
def test_any_text_survives_toml(name: str, stops: list[str]) -> None:
    config = config_of(model={"path": name}, rollout={"stop": stops})
    import tomllib

    read = Config.model_validate(tomllib.loads(to_toml(config)))
    assert read == config


@pytest.mark.parametrize(
    ("overrides", "fanout"),
    [
        ([], 0),
        (["rollout.engine=vllm"], AUTO_FANOUT),
        (["rollout.engine=vllm", "rollout.relay_fanout=0"], 0),
        (["rollout.engine=package.module:Engine"], 0),
        (["rollout.relay_fanout=1"], 1),
    ],
)
def test_weights_are_relayed_by_default_with_vllm_alone(
    tmp_path: Path, overrides: list[str], fanout: int
) -> None:
    assert load_config(write(tmp_path, MINIMAL), overrides).relay_fanout == fanout


STORED = ["weights.url=s3://bucket/weights"]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["rollout.relay_fanout=2"], r"rollout\.relay_fanout = 2: .*weights\.url.*Remove one of"),
        (["rollout.source=recorded", "data.completion_field=c"], r"weights\.url .*: remove it if"),
    ],
)
def test_what_has_no_effect_beside_a_weight_store_is_refused(
    tmp_path: Path, overrides: list[str], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config(write(tmp_path, MINIMAL), [*STORED, *overrides])


@pytest.mark.parametrize("others", [[], ["rollout.relay_fanout=0"], ["rollout.engine=vllm"]])
def test_through_a_weight_store_nothing_is_relayed(tmp_path: Path, others: list[str]) -> None:
    assert load_config(write(tmp_path, MINIMAL), [*STORED, *others]).relay_fanout == 0


LEND = ["fleet.sharing=lend"]
TWO_PAIRS = ["fleet.policy=2", "fleet.rollout=2"]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["fleet.policy=2"], "make them equal"),
        (["fleet.rollout_spares=1"], "rollout_spares"),
        (["fleet.autoscale=true", "fleet.policy_max=2", "fleet.rollout_max=2"], "autoscale"),
        (["fleet.provider=ray"], "which pods and actors do not share"),
        (["fleet.training_pairs=1"], "no effect"),
        (LEND, "with one pair"),
        ([*LEND, *TWO_PAIRS, "fleet.training_pairs=2"], "none of 2 pairs"),
        ([*LEND, *TWO_PAIRS, "train.max_staleness=0"], "always waits"),
    ],
)
def test_turns_need_pairs_of_workers_on_one_device(
    tmp_path: Path, overrides: list[str], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_config(write(tmp_path, MINIMAL), ["fleet.sharing=turns", *overrides])
