"""A configuration is read whole or refused with the field, the place and the remedy."""

import re
from operator import attrgetter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import Config, ConfigError, fleet_digest, load_config, to_toml
from paceline.config.load import field_lines, unknown_setting
from paceline.config.schema import AUTO_FANOUT
from tests.fixtures.configs import config_of

MINIMAL = '[model]\npath = "m"\n\n[data]\npath = "d"\n'


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


REFUSED = [
    ("[train]\nstepz = 3\n", "line 7: train.stepz is not a setting. Did you mean train.steps?"),
    ("[train]\n\nsteps = 0\n", "line 8: train.steps = 0: input should be greater"),
    ("[fleet]\nlease_ttl_s = 0.5\n", "line 7: fleet.lease_ttl_s must be at least twice"),
    ("[fleet\n", "not valid TOML"),
    ("[train.optimizer]\nlr = inf\n", "train.optimizer.lr = Infinity: input should be a finite"),
    ("chat = yes\n", 'line 6: chat = yes: .*a text has quotes \\("yes"\\)'),
    ('path = "y"\n', "line 6: path = .*stands twice: remove one"),
    ("[data]\nchat = true\n", r"line 6: \[data\]: .*stands twice"),
    ('name = "x\n', "line 6: .*a text has quotes .* on one line"),
    ("[redis]\npassword = hunter2\n", r"line 7: password = \*\*\*"),
    ("[train]\noptimizer = 3\n", r"line 7: .*Write \[train.optimizer\]"),
    ('[train]\nalgorithm = "grop"\n', "line 7: train.algorithm .*mean grpo"),
    ('[reward]\nfunctions = ["exact_mach"]\n', "line 7: reward.functions: .*mean exact_match"),
    ('[reward]\nfunctions = "exact_match"\n', r'line 7: .*Write \["exact_match"\]'),
    (
        '[reward]\nfunctions = { exact_match = "much" }\n',
        "reward.functions: the weight of exact_ma",
    ),
]
REFUSED_OVERRIDES = [
    ("train.steps=x", '--set train.steps=x: train.steps = "x"'),
    ("run.seed=18446744073709551616", "run.seed = 18446744073709551616: input should be less"),
    (f"train.steps={10**400}", "train.steps: it is above 2147483647, and no message carries more"),
    ("fleet.rollout=9999999999", "fleet.rollout: it is above 2147483647"),
    ("train=3", r"--set train=3: train = 3: it is a section. Write \[train\]"),
    ("train", "--set train: write it as section.field=value"),
    ("auth.tls_cert=a", "--set auth.tls_cert=a: auth.tls_cert and auth.tls_key go together"),
    ("reward.functions={exact_match=nan}", "--set reward.functions={exact_match=nan}: "),
    ("train.loss.mask_ratio_token=[2.0, 0.5]", r"= \[2.0, 0.5\]: the lower bound is above"),
    ("rollout.group_size=1", "--set rollout.group_size=1: rollout.group_size = 1: an adv"),
    ("data.chat_template_args={tokenize=true}", "tokenize is set by Paceline"),
    ("data.answer_field=none", "exact_match compares with the answer: set data.answer_field"),
]


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        *((MINIMAL + text, (), said) for text, said in REFUSED),
        *((MINIMAL, (override,), said) for override, said in REFUSED_OVERRIDES),
        ("lr = 3\n" + MINIMAL, (), "line 1: lr is not a setting. Did you mean train.optimizer.lr?"),
        (
            MINIMAL,
            ("train.max_staleness=4", "train.max_token_age=3"),
            "train.max_token_age = 3.*set it to at least 4",
        ),
        (
            MINIMAL,
            ("data.curriculum=success_rate", "train.algorithm=ppo", "rollout.group_size=1"),
            "data.curriculum .*rollout.group_size = 1",
        ),
        (
            MINIMAL,
            ("train.algorithm=online_dpo", "rollout.group_size=1"),
            "rollout.group_size = 1: set it to 2 or more",
        ),
        ('[data]\npath = "d"\n', (), r"model is missing. Add a section \[model\] with path"),
    ],
)
def test_a_refusal_names_field_place_and_remedy(
    tmp_path: Path, text: str, overrides: tuple[str, ...], said: str
) -> None:
    message = refusal(tmp_path, text, *overrides)
    assert re.search(said, message), message
    assert "\n" not in message and "hunter2" not in message and "instance of" not in message


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("", "an empty name is not a setting. The sections are run, model"),
        ("lr", "Did you mean train.optimizer.lr?"),
        (
            "train.optimizer.lr.x",
            "train.optimizer.lr.x is not a setting. Settings of [train.optimizer]",
        ),
        ("trian.x", "Did you mean [train]?"),
        ("nowhere." * 1000, "The sections are run, model"),
    ],
)
def test_a_name_that_is_no_setting_is_said_with_what_was_meant(name: str, said: str) -> None:
    why = unknown_setting(name)
    assert said in why and len(why) < 1000
    assert not unknown_setting("train.optimizer.lr")


def test_every_problem_is_said_at_once(tmp_path: Path) -> None:
    said = refusal(tmp_path, MINIMAL + "[train]\nsteps = 0\nlrr = 1\n", "rollout.top_p=2")
    assert len(said.splitlines()) == 3


def test_a_run_of_another_release_is_named_as_such(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f"{MINIMAL}[rollout]\nopenai_sampling = true\nolder = 1\n")
    (tmp_path / "events.jsonl").touch()
    with pytest.raises(ConfigError, match=r"^.* line 7: rollout\.openai_sampling .*release.*one$"):
        load_config(path)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
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
    ("overrides", "fanout", "through_host"),
    [
        ([], 0, False),
        (["rollout.engine=vllm"], AUTO_FANOUT, True),
        (["rollout.engine=vllm", "rollout.relay_fanout=0"], 0, True),
        (["rollout.engine=package.module:Engine"], 0, False),
        (["rollout.relay_fanout=1"], 1, True),
    ],
)
def test_weights_are_relayed_where_they_go_through_host_memory_in_any_case(
    tmp_path: Path, overrides: list[str], fanout: int, through_host: bool
) -> None:
    config = load_config(write(tmp_path, MINIMAL), overrides)
    assert (config.relay_fanout, config.weights_through_host) == (fanout, through_host)
