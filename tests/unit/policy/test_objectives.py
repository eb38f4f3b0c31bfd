"""Objectives: every built-in one and the example keep what elastic training rests on, and mistakes
are named."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from examples.own_objective.leave_one_out import LeaveOneOut
from paceline.config.fields import Section
from paceline.config.load import fleet_digest, run_digest
from paceline.config.objectives import BUILT_IN
from paceline.config.sections.objective_options import DpoOptions
from paceline.payloads.group_limits import GroupLimits
from paceline_launcher.cli import app
from policy_worker.conformance import conformance
from policy_worker.objectives.batch import BadGroup
from policy_worker.objectives.load import ObjectiveError, check_options, objective_class
from policy_worker.objectives.objective import Loss, Objective
from policy_worker.rows.group_reading import decode
from policy_worker.toy_step import totals_of
from testbed.nested_settings import nested
from tests.fixtures.policy_models import branch, make_config, make_group

EXAMPLE = "examples.own_objective.leave_one_out:LeaveOneOut"
HERE = "tests.unit.policy.test_objectives"
PARTS = [f"tests.fixtures.two_parts:{name}" for name in ("PolicyAndValue", "ScalarAlone")]
LOSSES = DpoOptions.model_fields["loss"].annotation.__args__  # type: ignore[union-attr]


def failing(name: str, options: dict[str, Any], train: dict[str, Any]) -> dict[str, str]:
    """The properties that do not hold, with what is said of them."""
    return {p.name: p.problem for p in conformance(name, options, nested(train)) if p.problem}


SETTINGS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((name, {}, {}) for name in BUILT_IN),
    *((name, {}, {}) for name in (EXAMPLE, f"{HERE}:Plain", *PARTS)),
    ("grpo", {}, {"kl_coef": 0.1, "kl_estimator": "k1"}),
    ("grpo", {}, {"kl_coef": 0.1, "reference": "scorer:teacher"}),
    ("grpo", {}, {"proximal": "trainer", "aggregation": "sequence_mean"}),
    (
        "grpo",
        {},
        {"proximal": "interpolated", "aggregation": "dr_grpo", "advantage_norm": False},
    ),
    (
        "grpo",
        {},
        {"mask_ratio_token": [0.5, 2.0], "mask_ratio_sequence": [0.7, 1.4], "dual_clip": "none"},
    ),
    ("grpo", {}, {"entropy_coef": 0.01, "aggregation": "sequence_sum"}),
    ("grpo", {}, {"kl_coef": 0.1, "kl_in": "reward"}),
    ("distill", {}, {"aggregation": "sequence_mean", "proximal": "trainer"}),
    ("ppo", {"kl_controller": "adaptive", "whiten_rewards": True}, {"kl_coef": 0.1}),
    (
        "ppo",
        {"gamma": 0.9, "value_clip": "none"},
        {"proximal": "trainer", "aggregation": "sequence_mean"},
    ),
    ("ppo", {"value_pretraining_steps": 2}, {"aggregation": "dr_grpo"}),
    ("ppo", {}, {"entropy_coef": 0.1, "surrogate": "weight"}),
    *(
        ("dpo", {"loss": loss, "label_smoothing": 0.1, "beta": 0.5, "sft_coef": 0.5}, {})
        for loss in LOSSES
    ),
    *((name, {"pairs": "all"}, {}) for name in ("online_dpo", "ipo", "orpo")),
    ("kto", {"desirable_weight": 1.3, "baseline": 0.3}, {}),
    ("reward_model", {"margin": True, "center_coef": 0.1, "pairs": "all"}, {}),
]


@pytest.mark.parametrize(("name", "options", "train"), SETTINGS, ids=str)
def test_an_objective_keeps_every_property_whatever_its_settings(
    name: str, options: dict[str, Any], train: dict[str, Any]
) -> None:
    assert failing(name, options, train) == {}


def test_the_examples_advantages_are_rewards_less_the_mean_of_the_others() -> None:
    groups = [
        make_group("t0", [1, 2], [[3], [4, 5], [6]], [1.0, 0.0, 0.5]),
        make_group("t1", [1], [[2]], [0.7]),
    ]
    branch(groups[1], 0, 1, [3])
    found = LeaveOneOut(make_config()).advantages(decode(groups), totals_of(groups))
    np.testing.assert_allclose(found, [1 - 0.25, 0 - 0.75, 0.5 - 0.5, 0.7, 0.7])
    branch(groups[0], 2, 2, [3])
    found = LeaveOneOut(make_config()).advantages(decode(groups[:1]), totals_of(groups[:1]))
    np.testing.assert_allclose(found, [1 - 0.25, 0 - 0.75, 0.5 - 0.5, 0.5 - 0.5])


def test_an_objective_that_compares_completions_takes_no_branches() -> None:
    """The controller refuses them, or, if it does not know the class, the policy worker."""
    config = make_config(train={"algorithm": "online_dpo"})
    assert GroupLimits.of(config).branches == 1 < GroupLimits.of(make_config()).branches
    pairs = objective_class("policy_worker.objectives.preferences:Dpo")(make_config())
    groups = [make_group("t0", [1], [[2], [3]], [1.0, 0.0])]
    assert pairs.columns(decode(groups), totals_of(groups)).pairs is not None
    branch(groups[0], 1, 1, [4])
    with pytest.raises(BadGroup, match="a sample has branches"):
        pairs.columns(decode(groups), totals_of(groups))


class Plain(Objective):
    """-log-prob times reward: the simplest that is right. The mistakes below change it."""

    def advantages(self, batch, totals):
        return batch.reward

    def loss(self, scores, tokens):
        return Loss(-(scores.logprobs * tokens.advantage * tokens.weight).sum())


class NormalisedOverTheBatch(Plain):
    def advantages(self, batch, totals):
        return (batch.reward - batch.reward.mean()) / (batch.reward.std() + 1e-4)


class MeanOfTheRow(Plain):
    def loss(self, scores, tokens):
        return Loss(-(scores.logprobs * tokens.advantage).mean())


class Random(Plain):
    def loss(self, scores, tokens):
        return Loss(super().loss(scores, tokens).total * random.random())


class Overflows(Plain):
    def loss(self, scores, tokens):
        ratio = (scores.logprobs - 2 * tokens.behaviour).exp()
        return Loss(-(ratio * tokens.advantage * tokens.weight).sum())


class DividesByZero(Plain):
    def advantages(self, batch, totals):
        centred = batch.reward - np.repeat([batch.reward.mean()], len(batch.reward))
        with np.errstate(all="ignore"):
            return centred / batch.reward.std()


class TrainsMaskedTokens(Plain):
    def loss(self, scores, tokens):
        return Loss(-(scores.logprobs * tokens.advantage).sum() / 100)

    def contributing(self, batch, columns):
        return np.ones(len(batch.length), bool)


@pytest.mark.parametrize(
    ("mistake", "where", "said"),
    [
        (NormalisedOverTheBatch, "groups may be split over replicas", "depends on other groups"),
        (MeanOfTheRow, "sequences may be packed into rows", "no mean"),
        (Random, "a step can be computed again", "random numbers"),
        (Overflows, "gradients are finite", "clamp before exp"),
        (DividesByZero, "gradients are finite", "epsilon"),
        (TrainsMaskedTokens, "masked tokens train nothing", "token's weight"),
    ],
)
def test_a_mistake_is_named(mistake: type[Objective], where: str, said: str) -> None:
    found = failing(f"{HERE}:{mistake.__name__}", {}, {})
    assert said in found[where]


class WithoutLoss(Objective):
    def advantages(self, batch, totals):
        return batch.reward


class OtherSignature(Plain):
    def loss(self, logprobs):
        return Loss(logprobs.sum())


class WithOptions(Plain):
    class Options(Section):
        beta: float = 0.1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "grpoo",
            "is not an objective. Did you mean grpo? Name one that is built in (grpo, dr_grpo",
        ),
        (f"{HERE}:Nothing", "has no 'Nothing'"),
        ("no_such_module:Class", "cannot import no_such_module"),
        (f"{HERE}:failing", "must be a subclass of policy_worker.objectives.objective.Objective"),
        (f"{HERE}:WithoutLoss", "it has no method loss"),
        (f"{HERE}:OtherSignature", "loss must take (self, scores, tokens)"),
    ],
)
def test_a_class_that_is_no_objective_is_named_with_the_remedy(name: str, said: str) -> None:
    with pytest.raises(ObjectiveError) as refused:
        objective_class(name)
    assert said in str(refused.value)


def test_options_are_those_of_the_class() -> None:
    check_options(WithOptions, "mine", {"beta": 0.2})
    with pytest.raises(ObjectiveError, match=r"objective\.bta: .*Options of mine: beta"):
        check_options(WithOptions, "mine", {"bta": 0.2})
    with pytest.raises(ObjectiveError, match=r"objective\.beta: .*number"):
        check_options(WithOptions, "mine", {"beta": "much"})


def test_options_are_part_of_what_the_fleet_shares_and_the_run_is_fixed_to() -> None:
    without, one, other = (
        make_config(train={"algorithm": "m:C"}, objective=options)
        for options in ({}, {"beta": 1}, {"beta": 2})
    )
    for digest in (fleet_digest, run_digest):
        assert len({digest(config)[0] for config in (without, one, other)}) == 3


def test_the_command_says_what_holds(tmp_path: Path) -> None:
    fine = CliRunner().invoke(app, ["check-objective", EXAMPLE, "--set", "objective.weight_cap=5"])
    assert fine.exit_code == 0, fine.output
    assert fine.output.count("ok  ") == 7 and "packed into rows" in fine.output
    bad = CliRunner().invoke(app, ["check-objective", f"{HERE}:MeanOfTheRow"])
    assert bad.exit_code == 1 and "FAILS" in bad.output and "no mean" in bad.output
    unknown = CliRunner().invoke(app, ["check-objective", "grpo", "--set", "rollout.top_p=1"])
    assert "[objective] or [train]" in str(unknown.exception)
