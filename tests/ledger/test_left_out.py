"""A replica that cannot be seeded, as behind a firewall: it does not hold up the others for ever."""

from __future__ import annotations

from controller.ledger import Ledger
from controller.ledger import commands as cmd
from controller.ledger.events import MeshBroken
from controller.ledger.fleet import SEED_TRIES
from tests.helpers.ledgers import Driven


def members(run: Driven) -> list[str]:
    return [m.worker_id for m in run.state.fleet.mesh.members]


def with_joiner() -> Driven:
    """p0 has committed a step; p1 is to be seeded by it."""
    run = Driven()
    run.policy("p0")
    run.rollout("r0")
    run.train()
    join(run)
    return run


def join(run: Driven) -> None:
    run.register("p1")
    run.observe("p1")
    assert members(run) == ["p0", "p1"]


def fail(run: Driven, by: str = "p0") -> str:
    """The present epoch's members cannot connect; what is said of it."""
    epoch = run.state.fleet.mesh_epoch
    run.do(cmd.BreakMesh(by, run.current[by], epoch, "rendezvous timed out"))
    said = str(run.event(MeshBroken).detail)
    run.do(cmd.FormMesh())
    return said


def test_a_replica_that_cannot_be_seeded_is_left_out_and_the_run_goes_on() -> None:
    run = with_joiner()
    said = [fail(run) for _ in range(SEED_TRIES)]
    assert members(run) == ["p0"]
    assert ["left out" in each for each in said] == [False] * (SEED_TRIES - 1) + [True]
    run.observe("p1")
    run.train()
    assert members(run) == ["p0"] and run.state.versions.step == 2
    run.failover()
    run.ledger = Ledger.from_snapshot(run.ledger.to_snapshot(), checked=True)
    run.observe("p1")
    assert members(run) == ["p0"]


def test_it_is_left_out_of_an_open_step_too() -> None:
    run = with_joiner()
    run.fill("r0", run.state.run.groups_per_step)
    assert set(run.state.steps.open.shards) == {"p0", "p1"}
    for _ in range(SEED_TRIES):
        fail(run, by="p1")
    assert set(run.state.steps.open.shards) == {"p0"}
    run.vote("p0")
    assert run.state.versions.step == 2


def test_started_anew_it_is_tried_again() -> None:
    run = with_joiner()
    for _ in range(SEED_TRIES):
        fail(run)
    join(run)
    run.observe("p1", state=run.state.versions.version)
    run.train()
    assert members(run) == ["p0", "p1"] and run.state.versions.step == 2


def test_another_source_may_reach_it() -> None:
    run = with_joiner()
    for _ in range(SEED_TRIES):
        fail(run)
    run.policy("p2")
    assert members(run) == ["p0", "p2"]
    run.die("p0")
    run.do(cmd.FormMesh())
    assert members(run) == ["p2", "p1"]
    # Tries with an earlier source do not count against it.
    for _ in range(SEED_TRIES - 1):
        fail(run, by="p2")
    assert members(run) == ["p2", "p1"]


def test_a_replica_that_has_the_state_is_never_left_out() -> None:
    run = with_joiner()
    for _ in range(SEED_TRIES - 1):
        fail(run)
    run.observe("p1", state=run.state.versions.version)
    for _ in range(SEED_TRIES):
        fail(run)
    assert members(run) == ["p0", "p1"]


def test_where_the_source_is_asked_to_leave_the_other_is_tried_once_more() -> None:
    run = with_joiner()
    for _ in range(SEED_TRIES):
        fail(run)
    run.do(cmd.Drain("d", "p0", replace=True))
    run.observe("p1")
    assert members(run) == ["p0", "p1"]
