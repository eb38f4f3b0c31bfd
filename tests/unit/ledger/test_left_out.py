"""Replicas that cannot reach each other, as behind a firewall, do not hold up the run for ever."""

from typing import Any

import pytest

from controller.ledger import Ledger
from controller.ledger import decisions as cmd
from controller.ledger.events import MeshBroken
from controller.ledger.state.fleet import HOLDER_S, JOINER_S, TRIES
from tests.fixtures.ledgers import Driven


def members(run: Driven) -> list[str]:
    return [m.worker_id for m in run.state.fleet.mesh.members]


def with_joiner() -> Driven:
    """p0 has committed a step; p1 is to receive the state from it."""
    run = Driven.fleet("p0", "r0")
    run.train()
    join(run)
    return run


def join(run: Driven) -> None:
    run.register("p1")
    run.observe("p1")
    assert members(run) == ["p0", "p1"]


def fail(run: Driven, by: str = "p0", after_s: float = HOLDER_S / (TRIES - 1)) -> str:
    """The present epoch's members cannot connect; what is said of it."""
    run.now += after_s
    epoch = run.state.fleet.mesh_epoch
    run.do(cmd.break_mesh(by, run.current[by], epoch, "rendezvous timed out"))
    said = str(run.event(MeshBroken).detail)
    run.do(cmd.form_mesh())
    return said


def fail_all(run: Driven, times: int = TRIES, **how: Any) -> list[str]:
    return [fail(run, **how) for _ in range(times)]


def test_a_replica_that_cannot_get_the_state_is_left_out_and_the_run_goes_on() -> None:
    run = with_joiner()
    said = fail_all(run)
    assert members(run) == ["p0"]
    assert ["left out" in each for each in said] == [False] * (TRIES - 1) + [True]
    run.observe("p1")
    run.train()
    assert members(run) == ["p0"] and run.state.versions.step == 2
    run.failover()
    run.ledger = Ledger.from_snapshot(run.ledger.to_snapshot(), checked=True)
    run.observe("p1")
    assert members(run) == ["p0"]


def test_it_is_left_out_in_time_although_the_clock_was_set_back() -> None:
    """Otherwise it would hold up the run for the hour that the clock was set back by."""
    run = with_joiner()
    fail(run)
    run.now -= 3600.0
    fail_all(run)
    assert members(run) == ["p0"]


def test_it_is_left_out_of_an_open_step_too() -> None:
    run = with_joiner()
    run.fill("r0", run.state.run.groups_per_step)
    assert set(run.state.steps.open.shards) == {"p0", "p1"}
    fail_all(run, by="p1")
    assert set(run.state.steps.open.shards) == {"p0"}
    run.vote("p0")
    assert run.state.versions.step == 2


def test_started_anew_it_is_tried_again() -> None:
    run = with_joiner()
    fail_all(run)
    join(run)
    run.observe("p1", state=run.state.versions.version)
    run.train()
    assert members(run) == ["p0", "p1"] and run.state.versions.step == 2


def test_another_source_may_reach_it() -> None:
    run = with_joiner()
    fail_all(run)
    run.policy("p2")
    assert members(run) == ["p0", "p2"]
    run.die("p0")
    run.do(cmd.form_mesh())
    assert members(run) == ["p2", "p1"]
    # Tries with an earlier source do not count against it.
    fail_all(run, TRIES - 1, by="p2")
    assert members(run) == ["p2", "p1"]


def apart(policies: int) -> Driven:
    """All hold the state; an epoch that steps were committed in has failed, and a new one is
    there."""
    run = Driven.fleet(*(f"p{number}" for number in range(policies)), "r0")
    run.train()
    fail(run)
    assert len(members(run)) == policies
    return run


def test_of_two_that_hold_the_state_and_lose_each_other_one_goes_on() -> None:
    run = apart(2)
    run.fill("r0", run.state.run.groups_per_step)
    groups = run.state.steps.open.groups
    said = [fail(run, by=f"p{number % 2}") for number in range(TRIES)]
    assert ["p1 is left out" in each for each in said] == [False] * (TRIES - 1) + [True]
    assert members(run) == ["p0"] and run.state.steps.open.groups == groups
    run.vote("p0")
    assert run.state.versions.step == 2, "the very step that was open"
    run.train()
    assert members(run) == ["p0"]
    run.die("p0")
    run.do(cmd.form_mesh())
    assert members(run) == ["p1"], "it is there where the other is not"


def test_of_three_the_last_goes_first_and_who_is_left_goes_on() -> None:
    """Where it was another pair that failed, one more is left out: a run of one goes on."""
    run = apart(3)
    fail_all(run)
    assert members(run) == ["p0", "p1"]
    fail_all(run)
    assert members(run) == ["p0"]
    run.train()
    assert run.state.versions.step == 2


@pytest.mark.parametrize("policies", [2, 3])
def test_a_network_that_hiccups_costs_nobody_its_place(policies: int) -> None:
    """A refused connection fails in milliseconds: many epochs in a row say little."""
    run = apart(policies)
    fail_all(run, 10 * TRIES, after_s=1.0)
    assert len(members(run)) == policies
    joining = with_joiner()
    fail_all(joining, 10 * TRIES, after_s=JOINER_S / (10 * TRIES))
    assert members(joining) == ["p0", "p1"]


def test_two_that_restore_and_never_reach_each_other_begin_as_one() -> None:
    run = Driven()
    for name in ("p0", "p1"):
        run.register(name)
        run.observe(name)
    for _ in range(TRIES):
        assert members(run) == ["p0", "p1"] and run.state.fleet.mesh.restore
        fail(run)
    assert members(run) == ["p0"]
    run.observe("p0", state=run.state.versions.version)
    run.rollout("r0")
    run.train()
    assert members(run) == ["p0"] and run.state.versions.step == 1


def test_a_source_that_is_asked_to_leave_trains_on_where_nobody_can_take_its_place() -> None:
    run = with_joiner()
    fail_all(run)
    run.do(cmd.drain("d", "p0", replace=True))
    run.observe("p1")
    said = []
    while len(members(run)) == 2 and len(said) < 4 * TRIES:
        said.append(fail(run))
    assert members(run) == ["p0"] and "left out" in said[-1]
    run.train()
    assert run.state.versions.step == 2


def test_a_step_that_is_committed_forgives_earlier_failures() -> None:
    run = apart(2)
    for _ in range(3):
        fail_all(run, TRIES - 1)
        run.train()
        fail(run)
    assert members(run) == ["p0", "p1"]


def test_after_a_rollback_everybody_is_tried_again() -> None:
    run = apart(2)
    fail_all(run)
    assert members(run) == ["p0"]
    run.train()
    run.die("p0")
    run.do(cmd.form_mesh())
    assert members(run) == ["p1"] and run.state.fleet.mesh.restore
    run.observe("p1", state=run.state.versions.version)
    run.register("p0")
    run.observe("p0")
    run.vote("p1")
    assert members(run) == ["p1", "p0"]
    fail_all(run, TRIES - 1, by="p1")
    assert members(run) == ["p1", "p0"], "earlier failures do not count"
