"""Paces of the planner: what bounds them, the ledger's admission rule, and what calibration
recovers."""

from dataclasses import replace

import pytest

from controller.ledger.decisions.leases import admissible
from controller.ledger.limits import dispatch_limit
from testbed.planner.calibration import MeasuredStep, calibrated
from testbed.planner.lengths import Lengths
from testbed.planner.pace import asynchronous, generation_seconds, synchronous
from testbed.planner.sizes import NoSplit, best_size, splits
from testbed.planner.system import Batch, EngineTime, StageTime, System
from tests.fixtures.ledgers import Driven

BATCH = Batch(groups=32, group_size=4, prompt_tokens=20, lengths=Lengths(200, 0.8, 1_000))
STEADY = replace(BATCH, lengths=Lengths(200, 0.0, 1_000))
ENGINE = EngineTime(fixed=0.01, per_sequence=1e-4, per_context_token=1e-7, cache_tokens=1e8)


def system(update: StageTime, **changes: object) -> System:
    return replace(
        System(BATCH, ENGINE, tp=1, update=update, log_prob=StageTime(8.0)),
        **changes,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_simulation_dispatches_as_the_ledger_does(staleness: int) -> None:
    run = Driven(max_staleness=staleness)
    assert admissible(run.state, 0) == dispatch_limit(0, staleness, 4) == 4 * (staleness + 1)
    assert dispatch_limit(3, 0.5, 4) == 4 * 3 + 6


def test_a_synchronous_step_is_the_sum_of_its_parts() -> None:
    slow = system(StageTime(80.0, 5.0), rest_s=3.0)
    pace = synchronous(slow, 8, log_prob=True)
    assert pace.step_s == pytest.approx(generation_seconds(slow, 8) + 15.0 + 1.0 + 3.0)
    assert pace.samples_per_s == pytest.approx(128 / pace.step_s)


def test_a_slow_trainer_bounds_the_pace() -> None:
    slow = system(StageTime(0.0, 100.0), pause_s=2.0, batch=STEADY)
    pace = asynchronous(slow, 1, 4, 1)
    assert pace.step_s == pytest.approx(102.0, rel=0.001)
    assert pace.policy_idle == pytest.approx(2 / 102, abs=0.01)
    assert pace.rollout_idle > 0.5


def test_calibration_recovers_a_system_from_its_own_steps() -> None:
    true = system(StageTime(80.0, 5.0), engine=ENGINE.with_overhead(0.007))
    rows = [
        MeasuredStep(
            n, generation_seconds(true, n), true.update.seconds(n), true.log_prob.seconds(n)
        )
        for n in (4, 8)
    ]
    (found,) = calibrated(system(StageTime(0.0)), rows)
    assert found.engine.fixed == pytest.approx(true.engine.fixed, rel=0.05)
    assert found.update.seconds(64) == pytest.approx(true.update.seconds(64))
    assert found.rest_s == 0.0


def test_divisions_hold_whole_replicas_and_engines() -> None:
    assert splits(16, 4, 2) == [4, 8, 12]
    assert splits(10, 4, 4) == [4]  # two GPUs stay unused
    with pytest.raises(NoSplit, match="no policy replica of 8 ranks"):
        splits(8, 8, 1)


def test_the_best_division_is_that_of_trying_all() -> None:
    mixed = system(StageTime(60.0, 1.0))
    plan = best_size([mixed], 12, 1, staleness=(2,))
    tried = {p: asynchronous(mixed, p, 12 - p, 2).samples_per_s for p in range(1, 12)}
    assert plan.variants[0].asynchronous.samples_per_s >= 0.97 * max(tried.values())
    assert plan.policy_gpus + plan.rollout_gpus == 12
