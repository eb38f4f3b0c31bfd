"""A fleet with one bad host, led by the controllers that ship, in virtual time."""

from collections.abc import Iterator

import pytest

from paceline.observe.vocabulary import FaultCause
from testbed.simulator.long_run import LongRun, shape_of

BAD = "host-1"
APART_S = 70.0


@pytest.fixture
def world() -> Iterator[LongRun]:
    """Three hosts of eight workers, and two of a replica each."""
    made = LongRun(1, shape_of(rollouts=24, policies=2, groups=4, step_s=4.0))
    yield made
    made.timeline.close()


def crash(world: LongRun) -> None:
    worker = next(w for w in world.workers.values() if w.alive and w.host == BAD)
    world.die(worker, FaultCause.CRASHED, told=True)


def go_on(world: LongRun, seconds: float) -> None:
    world.timeline.run(world.timeline.now + seconds, lambda: False)


def leases(world: LongRun) -> int:
    """Tasks that workers of the bad host hold, by the leader's ledger."""
    workers = world.leader.ledger.state.fleet.workers.values()
    return sum(len(w.held) for w in workers if w.host == BAD)


def test_a_host_whose_workers_crash_gets_no_new_work_under_any_leader(world: LongRun) -> None:
    go_on(world, 20.0)
    for _ in range(3):
        assert world.blocked() == []
        crash(world)
        go_on(world, APART_S)
    assert world.blocked() == [BAD]
    go_on(world, APART_S)
    assert leases(world) == 0
    world._leader_dies()
    before = world.steps
    go_on(world, APART_S)
    assert world.blocked() == [BAD] and leases(world) == 0
    assert world.steps > before + 5
