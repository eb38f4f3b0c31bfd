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
from paceline.config.schema import SETTINGS
from tests.fixtures.configs import config_of


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


def test_settings_are_validated_together() -> None:
    now = with_settings(config_of(), {"train.optimizer.lr": 5e-7, "rollout.top_p": 0.9})
    assert (now.train.optimizer.lr, now.rollout.top_p) == (5e-7, 0.9)
    with pytest.raises(ValidationError, match="warmup_steps is larger"):
        with_settings(config_of(), {"train.optimizer.warmup_steps": 101})


def test_values_are_json_and_give_back_the_config() -> None:
    one = config_of(train={"optimizer": {"lr": 3e-4}}, rollout={"top_k": 5})
    live = values_of(one, Live)
    assert live["train.optimizer.lr"] == 3e-4 and "train.optimizer.betas" not in live
    assert with_settings(config_of(), live) == one


def test_completions_never_get_longer_than_engines_were_built_for() -> None:
    short, long = config_of(rollout={"max_tokens": 512}), config_of(rollout={"max_tokens": 1024})
    assert "built for at most 512" in problem_of_change(short, short, long)
    assert problem_of_change(long, long, short) == ""
    averaged = config_of(rollout={"max_tokens": 512}, train={"loss": {"aggregation": "dr_grpo"}})
    assert "divisor" in problem_of_change(long, long, averaged)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("max_tokens", {}),
        # In an environment it is the longest sample that divides the loss.
        ("max_context", {"environment": "examples.calculator:Calculator", "max_tokens": 16}),
    ],
)
def test_replicas_agree_on_the_divisor_of_the_loss(name: str, more: dict[str, object]) -> None:
    def digests(aggregation: str) -> list[tuple[str, str]]:
        loss = {"loss": {"aggregation": aggregation}}
        return [
            fleet_digest(config_of(train=loss, rollout={"max_context": 1000, **more, name: value}))
            for value in (600, 700)
        ]

    ours, theirs = digests("dr_grpo")
    assert ours[0] != theirs[0]
    assert differences(ours[1], theirs[1]) == f"rollout.{name} is 600 in the run, 700 here"
    if name == "max_tokens":
        assert len(set(digests("token_mean"))) == 1


def test_a_default_is_in_no_digest_and_is_named_if_it_differs() -> None:
    """A release with one more setting continues the run."""
    ours, theirs = fleet_digest(config_of())[1], fleet_digest(config_of(run={"seed": 3}))[1]
    assert "seed" not in ours
    assert differences(ours, theirs) == "run.seed is 0 in the run, 3 here"
    assert "another release" in differences('{"run":{"seed":3}}', theirs)
    assert differences(ours, "nonsense") == "one of them cannot be read"


def test_the_numbers_of_a_scorer_are_fixed_and_its_pace_is_not() -> None:
    assert isinstance(change_of("scorers.helpful.batch_size"), AtStart)
    assert isinstance(change_of("scorers.helpful.path"), Fixed)
    assert "groups in flight were scored with it" in refusal("scorers.helpful.prompt")
