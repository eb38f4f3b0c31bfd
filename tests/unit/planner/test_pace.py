"""The planner against what can be counted out: a wave, drawn lengths, the ledger, all divisions.
Its numbers for published runs are those of its page: tests/process/test_benchmarks.py."""

from dataclasses import replace

import numpy as np
import pytest

from controller.ledger.decisions.leases import admissible
from controller.ledger.limits import dispatch_limit
from testbed.planner.calibration import MeasuredStep, calibrated
from testbed.planner.generation import Generation
from testbed.planner.lengths import Lengths
from testbed.planner.pace import asynchronous, generation_seconds
from testbed.planner.sizes import best_size
from testbed.planner.system import Batch, EngineTime, StageTime, System
from tests.fixtures.ledgers import Driven

BATCH = Batch(groups=32, group_size=4, prompt_tokens=20, lengths=Lengths(200, 0.8, 1_000))
ENGINE = EngineTime(fixed=0.01, per_sequence=1e-4, per_context_token=1e-7, cache_tokens=1e8)


def system(update: StageTime, **changes: object) -> System:
    return replace(
        System(BATCH, ENGINE, tp=1, update=update, log_prob=StageTime(8.0)),
        **changes,  # type: ignore[arg-type]
    )


ROOMY = EngineTime(fixed=0.01, per_sequence=0.001, per_context_token=1e-6, cache_tokens=1e9)


def run_out(engines: Generation) -> list[tuple[float, int]]:
    ended = []
    while engines.busy:
        ended += engines.advance(engines.tick_s)
    return ended


def wave_seconds(engine: EngineTime, lengths: list[int], prompt: int) -> float:
    """Token by token: every sequence that is longer than k is running while token k is made."""
    seconds = 0.0
    for k in range(max(lengths)):
        running = sum(length > k for length in lengths)
        seconds += engine.fixed + engine.per_sequence * running
        seconds += engine.per_context_token * running * (prompt + k)
    return seconds


def test_one_wave_takes_the_time_of_its_tokens() -> None:
    lengths = [3, 40, 41, 120, 500, 777, 1_000]
    engines = Generation(ROOMY, 1, prompt_tokens=50, cap=1_000)
    engines.add(0, np.array([lengths], dtype=float))
    ((ended, group),) = run_out(engines)
    assert group == 0
    assert ended == pytest.approx(wave_seconds(ROOMY, lengths, 50), rel=0.01)


@pytest.mark.parametrize("sigma", [0.0, 0.8, 1.7])
def test_mean_of_clipped_lengths_is_that_of_draws(sigma: float) -> None:
    lengths = Lengths(400, sigma, 2_000)
    drawn = lengths.draw(np.random.default_rng(1), 20_000, 8)
    assert drawn.min() >= 1
    assert drawn.max() <= 2_000
    assert lengths.mean == pytest.approx(drawn.mean(), rel=0.02)
    assert Lengths.of_mean(lengths.mean, 2_000, sigma).mean == pytest.approx(lengths.mean, rel=1e-6)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_simulation_dispatches_as_the_ledger_does(staleness: int) -> None:
    run = Driven(max_staleness=staleness)
    assert admissible(run.state, 0) == dispatch_limit(0, staleness, 4) == 4 * (staleness + 1)
    assert dispatch_limit(3, 0.5, 4) == 4 * 3 + 6


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


def test_the_best_division_is_that_of_trying_all() -> None:
    mixed = system(StageTime(60.0, 1.0))
    plan = best_size([mixed], 12, 1, staleness=(2,))
    tried = {p: asynchronous(mixed, p, 12 - p, 2).samples_per_s for p in range(1, 12)}
    assert plan.variants[0].asynchronous.samples_per_s >= 0.97 * max(tried.values())
    assert plan.policy_gpus + plan.rollout_gpus == 12
