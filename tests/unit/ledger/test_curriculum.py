"""The curriculum: rows that were always or never solved are drawn less, and the proof accounts for
them."""

import pytest

from controller.ledger import events as ev
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


def trained(run: Driven, steps: int, solved: set[int]) -> list[int]:
    """Rows that were drawn in ``steps`` steps. The rewards of the rows ``solved`` are always
    equal."""
    drawn = []
    for _ in range(steps):
        for lease in run.lease("r0", 4).leases:
            drawn.append(lease.index)
            dull = {"reward_std": 0.0, "reward_mean": 1.0} if lease.index in solved else {}
            run.submit("r0", lease, run.state.versions.version, **dull)
        run.vote("p0")
    return drawn


@pytest.fixture
def run() -> Driven:
    return Driven.fleet("p0", "r0", dataset_rows=8, steps=80, curriculum_min=0.1)


def serve(run: Driven) -> None:
    run.observe("r0", loaded=run.state.versions.version)


def test_rows_that_teach_nothing_are_drawn_less_and_all_rows_are_accounted_for(run: Driven) -> None:
    drawn: list[int] = []
    for _ in range(40):
        drawn += trained(run, 1, solved={0, 1, 2, 3})
        serve(run)
    assert len(drawn) == 160
    often = [drawn.count(row) for row in range(8)]
    assert max(often[:4]) < min(often[4:]) / 2
    assert min(often[:4]) >= 2, "no row is left out for good"
    report = run.coverage()
    assert list(report.problems()) == []
    assert sum(e.trained for e in report.epochs) == 160
    assert sum(e.passed_over for e in report.epochs) == run.state.tasks.passed_over > 50
    for epoch in report.epochs[:-1]:
        assert epoch.trained + epoch.passed_over == 8 and epoch.to_come == 0


def test_without_a_curriculum_nothing_is_measured_or_passed_over() -> None:
    run = Driven.fleet("p0", "r0", dataset_rows=8, steps=80)
    for _ in range(6):
        trained(run, 1, solved=set(range(8)))
        serve(run)
    assert run.state.tasks.passed_over == 0 and not run.state.tasks.curriculum.measured
    assert not any(isinstance(event, ev.RowsPassedOver) for event in run.last)
