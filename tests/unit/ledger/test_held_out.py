"""Held-out rewards: the best checkpoint stays, and a run may stop early."""

import pytest

from controller.ledger import Ledger, views
from controller.ledger.decisions.held_out import spared
from controller.ledger.state.evals import EvalRound, Evals
from paceline.ids import Step, Version
from tests.fixtures.ledgers import Driven


class Evaluated(Driven):
    """A step, its checkpoint and its evaluation at a time."""

    def __init__(self, **changes: object) -> None:
        super().__init__(eval_rows=1, eval_every=1, checkpoint_every=1, steps=100, **changes)
        self.policy("p0")
        self.rollout("r0")
        self.score(0.1)

    def score(self, reward: float) -> None:
        (lease,) = self.lease("r0").leases
        assert lease.task_id.startswith("e")
        version = self.state.versions.version
        self.submit("r0", lease, version, reward_mean=reward)

    def step(self, reward: float) -> list[str]:
        """The events that follow from the evaluation."""
        self.train()
        self.checkpoint()
        self.observe("r0", loaded=self.state.versions.version)
        before = len(self.journal)
        self.score(reward)
        return [event["type"] for event in self.journal[before:]]


def kept(run: Driven) -> list[int]:
    return [checkpoint.step for checkpoint in spared(run.state)]


def test_the_best_checkpoint_is_spared_until_a_better_one_is_evaluated() -> None:
    run = Evaluated()
    assert "BestCheckpointChosen" in run.step(0.4)
    assert "BestCheckpointChosen" in run.step(0.7)
    for reward in (0.6, 0.7, 0.5):
        assert "BestCheckpointChosen" not in run.step(reward), "the first of equals stays"
    assert kept(run) == [2]
    run.failover()
    assert kept(run) == [2]
    assert "BestCheckpointChosen" in run.step(0.8)
    assert kept(run) == [6]


def test_a_checkpoint_that_is_voided_is_not_the_best_any_more() -> None:
    run = Evaluated()
    run.step(0.4)
    run.step(0.5)
    run.policy("p1", "p2")
    run.train()
    run.checkpoint("p0")
    run.observe("r0", loaded=run.state.versions.version)
    run.score(0.9)
    assert run.state.versions.best == 3
    run.fill("r0", 4)
    run.vote("p0", "wrong")
    run.vote("p1", "right")
    run.vote("p2", "right")
    assert "CheckpointVoided" in [event["type"] for event in run.journal]
    assert (run.state.versions.best, run.state.evals.best) == (2, 2)
    assert (run.state.evals.since_best, list(run.state.evals.scores)) == (0, [0, 1, 2])


def evaluated(*scores: tuple[int, float]) -> Evals:
    evals = Evals()
    for step, score in scores:
        evals.rounds[Step(step)] = EvalRound(Step(step), 1, ())
        evals.end(Step(step), score)
    return evals


def test_rounds_are_ranked_by_step_however_late_they_end_and_anew_without_a_voided_one() -> None:
    evals = evaluated((0, 0.9), (20, 0.5), (10, 0.8), (30, 0.7))
    assert (evals.best, evals.since_best) == (0, 3)
    evals = evaluated((0, 0.5), (20, 0.9), (10, 0.6), (30, 0.7))
    assert (evals.best, evals.since_best) == (20, 1)
    for voided, best in ((20, (30, 0)), (30, (10, 0)), (10, (0, 0)), (0, (-1, 0))):
        evals.disown(Step(voided), Version(voided))
        assert (evals.best, evals.since_best) == best


def test_a_checkpoint_whose_evaluation_is_under_way_is_spared_too() -> None:
    run = Evaluated()
    run.step(0.4)
    run.train()
    run.checkpoint()
    assert kept(run) == [1, 2], "it may turn out to be the best"
    run.observe("r0", loaded=run.state.versions.version)
    run.score(0.2)
    assert kept(run) == [1]


def test_the_best_checkpoint_is_remembered_however_many_follow() -> None:
    run = Evaluated(early_stop_evals=0)
    run.step(0.9)
    for _ in range(70):
        run.step(0.3)
    assert kept(run) == [1]
    state = Ledger.from_snapshot(run.ledger.to_snapshot()).state
    assert state.versions.checkpoint.step == 71 and state.versions.best == 1


@pytest.mark.parametrize("patience", [0, 2])
def test_early_stopping_ends_the_run_after_its_patience_with_a_checkpoint(patience: int) -> None:
    run = Evaluated(early_stop_evals=patience)
    for reward in (0.5, 0.4, 0.6, 0.5):
        assert "StopRequested" not in run.step(reward)
    events = run.step(0.6)
    assert ("StopRequested" in events) == bool(patience)
    if patience:
        assert run.state.ended or views.phase(run.state) == "stopping"
        assert (
            "has not risen for 2 evaluations; the best was 0.600 after step 3" in run.state.reason
        )
        assert run.state.versions.checkpoint.step == run.state.versions.step
