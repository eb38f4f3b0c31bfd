"""An objective of a user that cannot be used, or that breaks a promise of the run, is named before
anything starts."""

from typing import Any

import pytest

from paceline.config.schema import Config
from paceline_launcher.preflight.user_code import objective as objective_checks
from policy_worker.conformance import doubts
from policy_worker.objectives.load import ObjectiveError
from policy_worker.objectives.objective import Part
from tests.fixtures.policy_models import make_config
from tests.unit.policy.test_objectives import Plain

HERE = "tests.unit.preflight.test_objective_checks"
THERE = "tests.unit.policy.test_objectives"


class WrongSignature(Plain):
    def loss(self, scores):  # type: ignore[override]
        raise NotImplementedError


class ConstructorRaises(Plain):
    def __init__(self, config):
        super().__init__(config)
        if config.rollout.group_size == 3:
            raise ValueError("a group of three has no middle")


class ConstructorLeaves(Plain):
    def __init__(self, config):
        raise SystemExit(0)


class HeadlessParts(Plain):
    @property
    def trains(self):
        return (Part("value"),)


class NeedsRealRows(Plain):
    def advantages(self, batch, totals):
        raise SystemExit("there is no such row")


def config_of(kind: str, **sections: Any) -> Config:
    return make_config(train={"algorithm": kind}, **sections)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (f"{HERE}:WrongSignature", "loss must take (self, scores, tokens)"),
        (f"{HERE}:ConstructorRaises", "a group of three has no middle"),
        (f"{HERE}:ConstructorLeaves", "SystemExit: 0"),
        (f"{HERE}:HeadlessParts", "the part value has the head lm"),
        (f"{HERE}:Objectiv", "Objectiv"),
        (f"{THERE}:NormalisedOverTheBatch", "depends on other groups: use the step's totals"),
    ],
)
def test_what_would_break_the_run_is_refused_with_the_remedy(kind: str, said: str) -> None:
    with pytest.raises(ObjectiveError, match=f"^train.algorithm = {kind}: ") as refused:
        doubts(config_of(kind))
    assert said in str(refused.value)


def test_pairs_of_an_environment_are_of_samples_without_branches() -> None:
    """Those that are built in say so to the environment themselves."""
    kind = "policy_worker.objectives.preferences:Dpo"
    played = {"environment": "play:guess", "max_context": 40, "group_size": 2}
    with pytest.raises(ObjectiveError, match=r"set rollout\.max_branches = 1$"):
        doubts(config_of(kind, rollout=played))
    assert doubts(config_of(kind, rollout=played | {"max_branches": 1})) == []
    assert config_of("dpo", rollout=played).most_branches == 1


def test_an_objective_that_the_toy_cannot_compute_is_only_doubted() -> None:
    assert all(
        "there is no such row" in said for said in doubts(config_of(f"{HERE}:NeedsRealRows"))
    )


@pytest.mark.heavy
def test_the_checks_before_a_start_say_both() -> None:
    """Checks run in child processes, as for a user."""
    (failed,) = objective_checks(config_of(f"{THERE}:NormalisedOverTheBatch"))
    assert failed.state == "fail" and "depends on other groups" in failed.found
    warned = list(objective_checks(config_of(f"{HERE}:NeedsRealRows")))
    assert {one.state for one in warned} == {"warn"}
    assert list(objective_checks(config_of("grpo"))) == []
