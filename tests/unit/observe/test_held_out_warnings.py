"""Warning of a held-out score that has fallen, from the journal of a run."""

from typing import Any

from controller.ledger.specs import EvalSet
from paceline.observe.held_out import HeldOut
from tests.fixtures.ledgers import Driven

ROWS = 64


class Scored(Driven):
    """Training is rewarded with a score, the set by the truth, after every step."""

    def __init__(self, **changes: Any) -> None:
        given = {"eval_rows": 0, "eval_drop": 0.1, "steps": 100, **changes}
        sets = (EvalSet("truth", rows=ROWS),)
        super().__init__(eval_every=1, checkpoint_every=1, eval_sets=sets, **given)
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

    @property
    def trouble(self) -> str:
        held_out = HeldOut()
        for event in self.journal:
            held_out.take(event["type"], event)
        return held_out.trouble


def hacked(**changes: Any) -> Scored:
    """The score rises while the truth falls."""
    run = Scored(**changes)
    run.measure(0.5)
    for score, truth in ((1.0, 0.9), (2.0, 0.9), (3.0, 0.5), (4.0, 0.4)):
        run.step(score, truth)
    return run


def test_a_fall_is_told_until_the_reward_is_back() -> None:
    run = hacked()
    assert run.trouble.endswith("fell to 0.406 after step 4; it was 0.906 after step 1")
    run.step(5.0, 0.2)
    assert "0.203 after step 5" in run.trouble
    run.step(5.0, 0.9)
    assert run.trouble == ""
    run.step(6.0, 0.3)
    assert run.trouble


def test_a_small_fall_and_a_warning_that_is_off_say_nothing() -> None:
    run = Scored()
    for truth in (0.1, 0.5, 0.46):
        run.step(1.0, truth) if run.journal[-1]["type"] == "EvalRecorded" else run.measure(truth)
    assert run.trouble == ""
    assert hacked(eval_drop=0.0).trouble == ""


def test_a_score_in_doubt_says_nothing() -> None:
    """The evaluation was of weights that the other replicas outvoted."""
    run = hacked()
    for step in (3, 4):
        run.journal.append({"type": "CheckpointVoided", "step": step})
    assert run.trouble == ""
