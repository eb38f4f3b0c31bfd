"""Runs of recorded data under random faults: every promise holds, and no row is ever too old."""

import random
from dataclasses import replace

import pytest

from controller.ledger.enums import DROPPED_FOR_AGE
from testbed.simulator import crash_points, faults
from testbed.simulator.cluster import Shape
from testbed.simulator.world import World


def seeds(first: int, count: int) -> pytest.MarkDecorator:
    """Seeds of schedules; make test-fast tries a quarter of them."""
    fast = count // 4
    return pytest.mark.parametrize(
        "seed",
        [
            pytest.param(first + n, marks=pytest.mark.heavy if n >= fast else ())
            for n in range(count)
        ],
    )


def recorded(shape: Shape) -> Shape:
    spec = replace(shape.spec, recorded=True, filter_uninformative=False, eval_rows=2)
    return replace(shape, spec=spec)


def expired(world: World) -> int:
    dropped = world.oracle.ledger.state.tasks.dropped
    return sum(dropped.get(reason, 0) for reason in DROPPED_FOR_AGE)


@seeds(6_000_000, 24)
def test_every_promise_holds_for_recorded_data_under_random_faults(seed: int) -> None:
    world = World(seed, recorded(faults.draw_shape(random.Random(seed))))
    faults.plan_faults(world, 12.0)
    world.run(quiet_after=20.0)
    assert expired(world) == 0
    state = world.oracle.ledger.state
    if state.reason == "completed" and not world.oracle.corrupted:
        assert state.run.steps in state.evals.scores


@seeds(6_100_000, 12)
def test_every_row_is_accounted_for_whatever_role_dies(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = crash_points.draw_shape
    monkeypatch.setattr(crash_points, "draw_shape", lambda rng: recorded(draw(rng)))
    world = crash_points.run_crash_points(seed)
    assert expired(world) == 0
