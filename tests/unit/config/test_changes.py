"""Every setting says whether a run may change it, and what to do if it may not."""

import re

import pytest
from pydantic import ValidationError

from paceline.config.changes import (
    change_of,
    differences,
    problem_of_change,
    refusal,
    values_of,
    with_settings,
)
from paceline.config.fields import AtStart, Fixed, Live
from paceline.config.load import fleet_digest
from paceline.config.rules import RULES, Rule
from paceline.config.schema import SETTINGS, Config


def config(**sections: dict[str, object]) -> Config:
    base = {"model": {"path": "/m"}, "data": {"path": "rows.jsonl"}}
    return Config.model_validate({**base, **sections})


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_changeable_or_refused_with_a_reason(name: str) -> None:
    why = refusal(name)
    assert bool(why) == (not isinstance(change_of(name), Live))
    if why:
        assert name in why and ("paceline" in why)


def test_rules_name_settings_that_exist() -> None:
    texts = [rule.text for rule in RULES if isinstance(rule, Rule)]
    for text in texts:
        plain = re.sub(r"\{.*?\}|docs/\S+", "", text)
        for name in re.findall(r"\b[a-z]+(?:\.[a-z_]+)+\b", plain):
            assert name in SETTINGS or name.startswith("objective."), name


def test_a_fixed_setting_is_refused_with_the_way_that_works() -> None:
    why = refusal("rollout.temperature")
    assert "log-probabilities" in why and "paceline up CONFIG --from CHECKPOINT" in why
    assert "paceline scale rollout=COUNT" in refusal("fleet.rollout")


def test_settings_are_validated_together() -> None:
    now = with_settings(config(), {"train.optimizer.lr": 5e-7, "rollout.top_p": 0.9})
    assert (now.train.optimizer.lr, now.rollout.top_p) == (5e-7, 0.9)
    with pytest.raises(ValidationError, match="warmup_steps is larger"):
        with_settings(config(), {"train.optimizer.warmup_steps": 101})


def test_values_are_json_and_give_back_the_config() -> None:
    one = config(train={"optimizer": {"lr": 3e-4}}, rollout={"top_k": 5})
    live = values_of(one, Live)
    assert live["train.optimizer.lr"] == 3e-4 and "train.optimizer.betas" not in live
    assert with_settings(config(), live) == one


def test_completions_never_get_longer_than_engines_were_built_for() -> None:
    short, long = config(rollout={"max_tokens": 512}), config(rollout={"max_tokens": 1024})
    assert "built for at most 512" in problem_of_change(short, short, long)
    assert problem_of_change(long, long, short) == ""
    averaged = config(rollout={"max_tokens": 512}, train={"loss": {"aggregation": "dr_grpo"}})
    assert "divisor" in problem_of_change(long, long, averaged)


def test_replicas_agree_on_the_divisor_of_the_loss() -> None:
    def digest(aggregation: str, **rollout: object) -> str:
        return fleet_digest(config(train={"loss": {"aggregation": aggregation}}, rollout=rollout))[
            0
        ]

    assert digest("dr_grpo", max_tokens=16) != digest("dr_grpo", max_tokens=512)
    assert digest("token_mean", max_tokens=16) == digest("token_mean", max_tokens=512)
    # In an environment it bounds a turn; the loss is divided by the longest sample.
    bounded = {"environment": "examples.calculator:Calculator", "max_context": 600}
    assert digest("dr_grpo", max_tokens=16, **bounded) == digest(
        "dr_grpo", max_tokens=512, **bounded
    )


@pytest.mark.parametrize(
    ("name", "more"),
    [("max_tokens", {}), ("max_context", {"environment": "examples.calculator:Calculator"})],
)
def test_another_divisor_of_the_loss_is_refused_by_the_name_of_its_setting(
    name: str, more: dict[str, object]
) -> None:
    ours, theirs = (
        fleet_digest(
            config(train={"loss": {"aggregation": "dr_grpo"}}, rollout={name: value, **more})
        )[1]
        for value in (600, 700)
    )
    assert differences(ours, theirs) == f"rollout.{name} is 600 in the run, 700 here"


def test_a_default_is_in_no_digest_and_is_named_if_it_differs() -> None:
    """A release with one more setting continues the run."""
    ours, theirs = fleet_digest(config())[1], fleet_digest(config(run={"seed": 3}))[1]
    assert "seed" not in ours
    assert differences(ours, theirs) == "run.seed is 0 in the run, 3 here"
    assert differences(ours, "nonsense") == "one of them cannot be read"


def test_the_numbers_of_a_scorer_are_fixed_and_its_pace_is_not() -> None:
    assert isinstance(change_of("scorers.helpful.batch_size"), AtStart)
    assert isinstance(change_of("scorers.helpful.path"), Fixed)
    assert "groups in flight were scored with it" in refusal("scorers.helpful.prompt")
