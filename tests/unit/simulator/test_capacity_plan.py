"""The simulator as a capacity planner: what it says where the answer is known."""

from __future__ import annotations

import pytest

from controller.simulator.plan import PlannedFleet, forecast, parse


def test_a_fleet_bound_by_training_runs_at_the_trainers_pace() -> None:
    fleet = PlannedFleet(
        policy=1,
        rollout=8,
        slots=8,
        groups_per_step=8,
        step_s=8.0,
        generate_s=1.0,
        spread=0.0,
        max_staleness=2,
        steps=12,
        transfer_s=0.001,
    )
    result = forecast(fleet)
    assert result.bound == "training"
    assert 0.85 < result.steps_per_s / result.ideal_steps_per_s < 1.02


def test_staleness_buys_throughput_where_generation_has_a_long_tail() -> None:
    def speed(max_staleness: int) -> float:
        fleet = PlannedFleet(
            rollout=4,
            slots=8,
            groups_per_step=8,
            step_s=4.0,
            generate_s=4.0,
            spread=1.0,
            max_staleness=max_staleness,
            steps=12,
        )
        return forecast(fleet, seed=1).steps_per_s

    assert speed(4) > 1.5 * speed(0)


def test_a_forecast_depends_on_nothing_but_fleet_and_seed() -> None:
    assert forecast(PlannedFleet(steps=5), seed=3) == forecast(PlannedFleet(steps=5), seed=3)


@pytest.mark.parametrize("word", ["policy", "policy=x", "trainer=2", "rollout=-1"])
def test_a_misspelt_fleet_is_named(word: str) -> None:
    with pytest.raises(ValueError, match=r"give policy=N"):
        parse([word])
