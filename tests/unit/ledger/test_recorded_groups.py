"""Recorded groups: no age, no weights, and a held-out loss that a policy replica measures."""

from typing import Any

from controller.ledger import decisions as cmd
from controller.ledger import events as ev
from controller.ledger.enums import EmptyReason, VerdictCode
from tests.fixtures.ledgers import Driven


class Recorded(Driven):
    def __init__(self, **changes: Any) -> None:
        super().__init__(recorded=True, **changes)
        self.policy("p0", "p1")
        self.register("r0")
        self.observe("r0")

    def measure(self, worker_id: str, loss: float | None, version: int | None = None) -> None:
        v = self.state.versions
        self.do(
            cmd.record_held_out(
                *(worker_id, self.current[worker_id], v.step),
                v.version if version is None else version,
                {} if loss is None else {"loss": loss, "nll": loss},
                0 if loss is None else 4,
                0,
            )
        )


def test_a_row_waits_for_no_weights_and_no_link_is_made() -> None:
    run = Recorded()
    assert run.state.fleet.links == {}
    assert len(run.lease("r0", 100, version=-1).leases) == 2 * 4
    assert run.lease("r0", 1).empty_reason is EmptyReason.STALENESS, "admission still bounds them"


def test_a_group_is_trained_however_many_steps_it_took() -> None:
    run = Recorded(steps=20, late_groups="drop")
    (slow,) = run.lease("r0", 1).leases
    for _ in range(9):
        run.train()
    assert run.submit("r0", slow, 0).code is VerdictCode.ACCEPTED
    run.train()
    assert not run.state.tasks.dropped
    assert slow.task_id in run.state.steps.history[10]


def test_metrics_have_no_age_and_no_reward() -> None:
    run = Recorded()
    run.train()
    metrics = run.state.steps.metrics
    assert metrics["tokens"] == 4 * 20
    assert not [n for n in metrics if n.startswith(("staleness", "token_age", "reward", "late"))]


def test_a_measurement_whose_record_a_failover_lost_does_not_hold_up_the_end() -> None:
    run = Recorded(eval_rows=4, eval_every=3, steps=1)
    # The replica had the reply before Redis lost the record, so it votes.
    run.train()
    lost = run.event(ev.EvalRecorded)
    assert (lost.step, lost.count, lost.left_out, lost.ranking) == (0, 0, 4, None)
    assert list(run.state.evals.rounds) == [1], "the state after step 1 is there"
    run.checkpoint()
    run.measure("p0", 2.0)
    assert run.state.ended


def test_the_first_rank_measures_the_held_out_rows_before_its_next_step() -> None:
    run = Recorded(eval_rows=4, eval_every=1)
    assert (run.ask("p0")[0], run.ask("p1")[0]) == ("evaluate", "wait")
    run.measure("p1", 9.0)  # it is not asked
    assert run.ask("p0")[0] == "evaluate"
    run.measure("p0", 2.0)
    recorded = run.event(ev.EvalRecorded)
    assert (recorded.loss, recorded.ranking, recorded.count) == (2.0, -2.0, 4)
    assert run.ask("p0")[0] == "wait"
    run.measure("p0", 3.0)  # repeated: counts once
    assert run.state.evals.scores == {0: -2.0}


def test_the_next_first_rank_measures_if_the_one_before_died() -> None:
    run = Recorded(eval_rows=4, eval_every=1)
    run.die("p0")
    assert run.ask("p1")[0] == "evaluate"
    run.measure("p1", 2.0)
    assert run.state.evals.scores == {0: -2.0}


def test_a_measurement_of_another_state_counts_for_nothing() -> None:
    run = Recorded(eval_rows=4, eval_every=1)
    run.measure("p0", 2.0)
    run.train()
    run.measure("p0", 1.0, version=0)
    assert run.state.evals.scores == {0: -2.0}
    run.measure("p0", 1.0)
    assert run.state.evals.scores == {0: -2.0, 1: -1.0}


def test_the_lowest_loss_is_the_best_checkpoint_and_a_rise_stops_the_run() -> None:
    run = Recorded(eval_rows=4, eval_every=1, checkpoint_every=1, early_stop_evals=2, eval_drop=0.1)
    run.measure("p0", 3.0)
    seen: list[str] = []
    for loss in (2.0, 2.5, 2.6):
        run.train()
        run.checkpoint()
        before = len(run.journal)
        run.measure("p0", loss)
        seen += [ev.from_json(event).text() for event in run.journal[before:]]
    assert run.state.versions.best == 1
    assert any("the held-out loss has not fallen for 2 evaluations" in text for text in seen)


def test_the_run_ends_only_after_its_last_measurement() -> None:
    run = Recorded(eval_rows=4, eval_every=5, steps=1)
    run.measure("p0", 3.0)
    run.train()
    run.checkpoint()
    assert not run.state.ended
    assert (run.ask("p0")[0], run.ask("p1")[0]) == ("evaluate", "finished")
    run.measure("p0", None)  # no row could be measured
    assert run.state.ended
