"""Evaluation sets in the ledger: one round, one version, and the metric that ranks checkpoints."""

from typing import Any

import pytest

from controller.ledger import events as ev
from controller.ledger.enums import VerdictCode
from controller.ledger.specs import EvalSet
from tests.fixtures.ledgers import Driven

MATH = EvalSet("math", rows=2, samples=4)
RARE = EvalSet("rare", rows=1, every=4)


class Sets(Driven):
    def __init__(self, **changes: Any) -> None:
        given = {"eval_rows": 1, "eval_every": 2, "eval_sets": (MATH, RARE), **changes}
        super().__init__(checkpoint_every=1, max_staleness=4, **given)
        self.policy("p0")
        self.rollout("r0")

    def answer(self, lease: Any, rewards: tuple[float, ...], **changes: Any) -> Any:
        answers = tuple("right" if reward else "wrong" for reward in rewards)
        version = self.state.versions.version
        return self.submit(
            "r0",
            lease,
            version,
            sequences=len(rewards),
            reward_mean=sum(rewards) / len(rewards),
            rewards=rewards,
            answers=answers,
            lengths=(5,) * len(rewards),
            **changes,
        )

    def evaluate(self, math: tuple[float, ...] = (1.0, 0.0, 0.0, 0.0), rest: float = 0.5) -> None:
        """All rows that wait."""
        self.observe("r0", loaded=self.state.versions.version)
        for round_ in list(self.state.evals.rounds.values()):
            for lease in self.lease("r0", len(round_.pending)).leases:
                self.answer(lease, math if lease.eval_set == "math" else (rest,))

    def recorded(self) -> list[dict[str, Any]]:
        return [event for event in self.journal if event["type"] == "EvalRecorded"]


def test_a_round_has_the_rows_of_all_sets_and_each_lease_names_its_set() -> None:
    run = Sets()
    leases = run.lease("r0", 9).leases
    named = [(each.task_id, each.eval_set, each.index) for each in leases if each.task_id[0] == "e"]
    assert named == [("e0.0", "", 0), ("e0.1", "math", 0), ("e0.2", "math", 1), ("e0.3", "rare", 0)]
    run.failover()


def test_metrics_of_every_set_are_in_the_record_and_survive_a_failover() -> None:
    run = Sets()
    leases = run.lease("r0", 4).leases
    run.answer(leases[0], (0.5,))
    run.answer(leases[1], (1.0, 0.0, 0.0, 0.0))
    run.failover()
    run.answer(leases[2], (1.0, 1.0, 0.0, 1.0), truncated=2)
    run.answer(leases[3], (0.0,))
    held_out, math, rare = run.event(ev.EvalRecorded).sets
    assert (held_out.name, held_out.metrics["reward"]) == ("held_out", 0.5)
    assert math.metrics["pass@1"] == pytest.approx(0.5)
    assert math.metrics["pass@2"] == pytest.approx((0.5 + 1.0) / 2)
    assert math.metrics["pass@4"] == 1.0
    assert math.metrics["maj@4"] == pytest.approx(0.5), (
        "wrong wins the first vote, right the second"
    )
    assert (math.metrics["tokens"], math.metrics["truncated"]) == (5.0, 0.25)
    assert rare.metrics["reward"] == 0.0
    assert run.state.evals.scores == {0: 0.5}, "the first set ranks"
    run.failover()


def test_a_set_is_evaluated_every_so_often_and_at_the_end() -> None:
    run = Sets(steps=5)
    run.evaluate()
    for _ in range(5):
        run.train()
        run.checkpoint()
        run.evaluate()
    due = {e["step"]: [each["name"] for each in e["sets"]] for e in run.recorded()}
    both, alle = ["held_out", "math"], ["held_out", "math", "rare"]
    assert due == {0: alle, 2: both, 4: alle, 5: alle}
    assert run.names()[-1] == "RunFinished"


def test_the_named_metric_ranks_checkpoints_and_stops_the_run() -> None:
    run = Sets(eval_every=1, best_metric="math/pass@4", early_stop_evals=2)
    scores = [(1.0, 0.0, 0.0, 0.0), (0.0,) * 4, (0.5,) * 4]
    run.evaluate((0.0,) * 4, rest=0.1)
    for math in scores:
        run.train()
        run.checkpoint()
        run.evaluate(math, rest=0.9)
    best = [event for event in run.journal if event["type"] == "BestCheckpointChosen"]
    assert [(e["step"], e["metric"], e["reward_mean"]) for e in best] == [(1, "math/pass@4", 1.0)]
    (stop,) = [event for event in run.journal if event["type"] == "StopRequested"]
    assert "math/pass@4 has not risen for 2 evaluations" in stop["reason"]


def test_a_round_without_the_ranking_set_ranks_nothing() -> None:
    run = Sets(best_metric="rare/reward")
    run.evaluate()
    for _ in range(2):
        run.train()
        run.checkpoint()
    run.evaluate()
    assert [e["step"] for e in run.recorded()] == [0, 2]
    assert run.recorded()[1]["score"] is None and run.recorded()[1]["reward_mean"] is None
    assert list(run.state.evals.scores) == [0]


@pytest.mark.parametrize("samples", [1, 3, 5])
def test_a_prompt_with_another_number_of_samples_is_refused(samples: int) -> None:
    run = Sets()
    lease = run.lease("r0", 2).leases[1]
    verdict = run.answer(lease, (1.0,) * samples)
    assert verdict.code is VerdictCode.INVALID and "math takes 4" in verdict.message
    assert run.answer(lease, (1.0,) * 4).code is VerdictCode.ACCEPTED
    assert run.answer(lease, (1.0,) * 4).code is VerdictCode.DUPLICATE


def test_the_samples_of_a_prompt_have_the_same_random_numbers_in_every_round() -> None:
    run = Sets(eval_every=1)
    seeds = []
    for _ in range(2):
        run.observe("r0", loaded=run.state.versions.version)
        leases = run.lease("r0", 4).leases
        seeds.append({each.index: each.seed for each in leases if each.eval_set == "math"})
        for lease in leases:
            if lease.task_id[0] == "e":
                run.answer(lease, (1.0,) * (4 if lease.eval_set == "math" else 1))
        run.train()
    assert seeds[0] == seeds[1] and len(set(seeds[0].values())) == 2
