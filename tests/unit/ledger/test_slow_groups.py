"""Groups of log-normal durations on the real ledger: what becomes of the slow ones."""

import heapq
import random
from collections.abc import Iterator
from typing import Any

from controller.ledger import views
from controller.ledger.specs import LeasedTask
from tests.fixtures.ledgers import Driven

STEPS, BATCH, TRAIN_S, SIGMA = 60, 16, 0.3, 1.0
SLOW = 1.645
"""Standard deviations above which 5 % of a normal distribution lie."""


def normal(lease: LeasedTask) -> float:
    """Standard normal; a property of the task, as a length is of its prompt."""
    return random.Random(f"{lease.task_id}").gauss(0.0, 1.0)


def trained_run(**changes: Any) -> tuple[Driven, list[LeasedTask]]:
    """A whole run in virtual time, and the leases of the groups that were trained.

    As many groups as admission allows generate at once, exp(SIGMA * normal) seconds each, with the
    weights of the moment; a step takes TRAIN_S."""
    spec = {"steps": STEPS, "groups_per_step": BATCH, "max_staleness": 4, "max_token_age": 32}
    run = Driven.fleet("p0", "r0", checked=False, **{**spec, **changes})
    leases: dict[str, LeasedTask] = {}
    trained: list[LeasedTask] = []
    order: Iterator[int] = iter(range(1 << 30))
    timeline: list[tuple[float, int, str, Any]] = []
    clock, training = 0.0, 0
    while not run.state.ended and run.state.versions.step < STEPS:
        while given := run.lease("r0", 64).leases:
            for lease in given:
                leases[lease.task_id] = lease
                ends = clock + 2.718281828 ** (SIGMA * normal(lease))
                made_by = (lease, run.state.versions.version)
                heapq.heappush(timeline, (ends, next(order), "group", made_by))
        step = run.state.steps.open
        if step is not None and training < step.step:
            training = step.step
            heapq.heappush(timeline, (clock + TRAIN_S, next(order), "step", step.groups))
        clock, _, what, data = heapq.heappop(timeline)
        if what == "group":
            lease, first = data
            last = run.state.versions.version
            versions = ((first, 10), (last, 10)) if last > first else ((first, 20),)
            run.submit("r0", lease, first, max_version=last, token_versions=versions)
        else:
            trained += [leases[task_id] for task_id in data]
            run.vote("p0")
    return run, trained


def slow_share(trained: list[LeasedTask]) -> float:
    """Of the slowest 5 % of tasks, in what was trained."""
    return sum(normal(lease) > SLOW for lease in trained) / len(trained)


def test_no_group_is_left_out_for_being_slow() -> None:
    run, trained = trained_run()
    assert views.counts(run.state).dropped == {}
    assert len(trained) == STEPS * BATCH
    assert slow_share(trained) >= 0.8 * 0.05


def test_no_group_is_expired_while_it_has_a_token_of_the_bound() -> None:
    """A bound as tight as staleness itself: the first tokens of slow groups are masked, and their
    last ones, of the newest weights, are trained."""
    run, trained = trained_run(max_token_age=4)
    assert views.counts(run.state).dropped == {}
    assert slow_share(trained) >= 0.8 * 0.05


def test_a_run_that_drops_late_groups_leaves_the_slow_ones_out() -> None:
    run, trained = trained_run(late_groups="drop")
    assert views.counts(run.state).dropped["stale"] > len(trained) // 10
    assert slow_share(trained) < 0.2 * 0.05
