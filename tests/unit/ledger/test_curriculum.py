"""The curriculum: rows that were always or never solved are drawn less, and the proof accounts for
them."""

import pytest

from controller.ledger.enums import Kind
from controller.ledger.specs import LeasedTask
from controller.ledger.state.curriculum import Curriculum
from tests.fixtures.ledgers import Driven, group

SEED = 11


def groups(row_std: float, mean: float):
    return group(LeasedTask("t0", 1, Kind.TRAIN, 0, 0, 1), reward_std=row_std, reward_mean=mean)


ALWAYS, NEVER, MIXED = groups(0.0, 1.0), groups(0.0, 0.0), groups(0.5, 0.5)


def test_each_group_of_equal_rewards_in_a_row_halves_the_probability_down_to_the_minimum() -> None:
    curriculum = Curriculum()
    found = []
    for newest in (ALWAYS, ALWAYS, ALWAYS, ALWAYS, ALWAYS, MIXED, NEVER, ALWAYS):
        curriculum.measure(5, newest)
        found.append(curriculum.probability(5, 0.1))
    assert found == [0.5, 0.25, 0.125, 0.1, 0.1, 1.0, 0.5, 0.5]
    assert curriculum.probability(4, 0.1) == curriculum.probability(10**6, 0.1) == 1.0
    assert (curriculum.always, curriculum.never) == (1, 0)
    for _ in range(1000):
        curriculum.measure(5, ALWAYS)
    assert curriculum.probability(5, 1e-9) == 1e-9
    curriculum.measure(5, MIXED)
    assert curriculum.probability(5, 1e-9) == 1.0, "a long time is forgotten with one group"


@pytest.mark.parametrize(("minimum", "settled"), [(0.1, 9), (0.3, 9), (0.1, 1), (1.0, 9)])
def test_rows_are_left_out_at_the_frequency_that_the_probability_says(
    minimum: float, settled: int
) -> None:
    curriculum = Curriculum()
    for _ in range(settled):
        curriculum.measure(0, NEVER)
    taken = sum(not curriculum.leaves_out(0, n, SEED, minimum) for n in range(20_000))
    expected = 20_000 * max(minimum, 0.5**settled)
    assert abs(taken - expected) <= 5 * (expected * (1 - expected / 20_000)) ** 0.5


@pytest.mark.parametrize("minimum", [0.0, 0.1])
def test_rows_are_measured_and_passed_over_with_a_curriculum_alone(minimum: float) -> None:
    run = Driven.fleet("p0", "r0", dataset_rows=8, steps=80, curriculum_min=minimum)
    for _ in range(12):
        run.train(reward_std=0.0, reward_mean=1.0)
        run.observe("r0", loaded=run.state.versions.version)
    tasks = run.state.tasks
    assert (tasks.passed_over > 0, bool(tasks.curriculum.measured)) == (minimum > 0, minimum > 0)
    report = run.coverage()
    assert list(report.problems()) == []
    assert sum(epoch.passed_over for epoch in report.epochs) == tasks.passed_over
