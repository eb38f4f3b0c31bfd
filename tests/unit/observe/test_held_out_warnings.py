"""Warnings from evaluations, from the journal of a run: each once, and told as long as it holds."""

from typing import Any

import pytest

from controller.ledger.specs import EvalSet
from paceline.config.sections.evaluation import measures_truth
from paceline.observe.held_out import Estimate, HeldOut, Warned
from tests.fixtures.configs import config_of
from tests.fixtures.ledgers import Driven

ROWS = 64
TRUTH = EvalSet("truth", rows=ROWS, truth=True)


class Scored(Driven):
    """Training is rewarded with a score, the set by the truth, after every step."""

    def __init__(self, of: EvalSet = TRUTH, **changes: Any) -> None:
        given = {"eval_rows": 0, "eval_drop": 0.1, "steps": 100, **changes}
        super().__init__(eval_every=1, checkpoint_every=1, eval_sets=(of,), **given)
        self.policy("p0")
        self.rollout("r0")

    def measure(self, truth: float) -> None:
        """``truth``: share of the rows with reward 1."""
        version = self.state.versions.version
        self.observe("r0", loaded=version)
        for lease in self.lease("r0", ROWS).leases:
            self.submit("r0", lease, version, reward_mean=float(lease.index < truth * ROWS))

    def step(self, score: float, truth: float) -> None:
        self.train(reward_mean=score)
        self.measure(truth)

    def folded(self) -> tuple[HeldOut, list[Warned]]:
        """Evaluations so far, and every warning that they have given."""
        held_out, warned = HeldOut(), []
        for event in self.journal:
            warned += held_out.take(event["type"], event)
        return held_out, warned

    def warnings(self, kind: str = "reward_hacking") -> list[Warned]:
        return [warned for warned in self.folded()[1] if warned.kind == kind]

    @property
    def trouble(self) -> str:
        return self.folded()[0].trouble


def hacked() -> Scored:
    run = Scored()
    run.measure(0.5)
    for score, truth in ((1.0, 0.9), (2.0, 0.9), (3.0, 0.5), (4.0, 0.4)):
        run.step(score, truth)
    return run


def test_a_score_that_rises_while_the_truth_falls_is_a_warning_once() -> None:
    run = hacked()
    (warned,) = run.warnings()
    assert warned.step == 4
    assert "1.000 to 3.500" in warned.text and "truth/reward" in warned.text
    assert "stop at step 1" in run.trouble and "train.loss.kl_coef" in run.trouble
    run.step(5.0, 0.2)
    assert len(run.warnings()) == 1, "it is known"
    assert "0.203 after step 5" in run.trouble


def test_a_truth_that_recovers_ends_the_trouble_and_another_fall_is_another_warning() -> None:
    run = hacked()
    run.step(5.0, 0.9)
    assert run.trouble == ""
    run.step(6.0, 0.3)
    run.step(7.0, 0.3)
    assert len(run.warnings()) == 2 and run.trouble


def test_a_set_that_scorers_judge_too_and_a_warning_that_is_off_say_nothing() -> None:
    for run in (Scored(EvalSet("truth", rows=ROWS)), Scored(eval_drop=0.0)):
        run.measure(0.9)
        for score in (1.0, 2.0, 3.0):
            run.step(score, 0.1)
        assert run.warnings() == [] and "exploited" not in run.trouble


def test_a_score_in_doubt_says_nothing() -> None:
    """The newest evaluation was of weights that the other replicas outvoted."""
    run = hacked()
    assert run.trouble
    run.journal.append({"type": "CheckpointVoided", "step": 4})
    held_out, _ = run.folded()
    assert sorted(held_out.checked["truth"]) == [0, 1, 2, 3]
    assert "exploited" not in held_out.trouble


def test_a_fall_is_a_warning_once_until_the_reward_is_back() -> None:
    run = Scored(EvalSet("any", rows=ROWS))
    for truth in (0.1, 0.5, 0.46, 0.4):
        run.step(1.0, truth) if run.journal[-1]["type"] == "EvalRecorded" else run.measure(truth)
    (fell,) = run.warnings("held_out")
    assert (fell.kind, fell.step) == ("held_out", 3)
    assert fell.text.endswith("it was 0.500 after step 1")
    run.step(1.0, 0.3)
    assert len(run.warnings("held_out")) == 1, "it is known"
    run.step(1.0, 0.5)
    assert run.trouble == ""
    run.step(1.0, 0.4)
    assert len(run.warnings("held_out")) == 2 and run.trouble


def test_the_score_of_a_round_is_that_of_the_steps_since_the_round_before() -> None:
    run = Scored(EvalSet("truth", rows=ROWS, every=3, truth=True))
    run.measure(0.5)
    for score in (1.0, 2.0, 6.0):
        run.train(reward_mean=score)
    run.measure(0.5)
    found = run.folded()[0].checked["truth"]
    assert found[0].score is None
    score = found[3].score
    assert isinstance(score, Estimate) and score.mean == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("training", "of_the_set", "measures"),
    [
        (["scorer:helpful"], ["exact_match"], True),
        ({"scorer:helpful": 1.0, "format:x": 0.1}, ["exact_match"], True),
        (["scorer:helpful"], ["scorer:helpful"], False),
        (["scorer:helpful"], None, False),
        (["exact_match"], ["math_verify"], False),
    ],
)
def test_which_sets_show_what_a_learned_reward_stands_for(
    training: Any, of_the_set: Any, measures: bool
) -> None:
    config = config_of(
        data={"answer_field": "answer"},
        reward={"functions": training},
        scorers={"helpful": {"kind": "reward_model", "path": "rm"}},
        evaluation={"sets": {"truth": {"path": "t", "reward": of_the_set}}},
    )
    assert measures_truth(config.evaluation.sets["truth"], config.reward) == measures
