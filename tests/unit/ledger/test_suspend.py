"""A run that is stopped for now: what it still does, and from where it goes on."""

import pytest

from controller.ledger import decisions as cmd
from controller.ledger import events as ev
from controller.ledger import views
from controller.ledger.enums import SuspendStage
from tests.fixtures.ledgers import Driven


def stepping(**changes: object) -> Driven:
    """Two replicas after step 1, with step 2 open and a task leased."""
    run = Driven.fleet("p0", "p1", "r0", **changes)
    run.train()
    run.fill("r0", 4)
    run.lease("r0", 1)
    assert run.state.steps.open is not None
    return run


def suspend(run: Driven, stage: str = "finish_step", request_id: str = "") -> str:
    done: str = run.do(cmd.suspend(request_id or f"stop-{stage}", SuspendStage(stage), "Ctrl-C"))
    return done


def saved(run: Driven) -> None:
    """It stops for now: the open step is committed and saved."""
    suspend(run)
    run.vote("p0")
    run.vote("p1")
    assert views.phase(run.state) == "suspending"
    run.checkpoint()
    assert views.phase(run.state) == "suspended"


def faults(run: Driven) -> list[str]:
    events = [ev.from_json(e) for e in run.journal]
    return [e.text() for e in events if e.listed and e.severity.is_fault]


def test_a_stop_commits_the_open_step_and_waits_for_its_checkpoint() -> None:
    run = stepping()
    suspend(run, request_id="first")
    assert run.lease("r0", 1).leases == ()
    assert run.directive("p0").checkpoint_step == 2
    saved(run)
    assert run.state.versions.checkpoint.step == 2
    assert {run.told(w) for w in ("p0", "p1", "r0")} == {"stopped"}


def test_a_step_that_takes_too_long_is_left_and_the_last_commit_is_checkpointed() -> None:
    run = stepping()
    suspend(run)
    assert not run.directive("p0").leave_step
    suspend(run, "leave_step")
    assert run.names()[:3] == ["SuspendRequested", "StepAborted", "MeshBroken"]
    assert (run.directive("p0").leave_step, run.directive("p0").checkpoint_step) == (True, 1)
    # Some members may wait in collectives of the old epoch for one that has left it.
    assert run.directive("p0").mesh.epoch == run.state.fleet.mesh_epoch
    run.checkpoint()
    assert views.phase(run.state) == "suspended"
    assert len(run.state.steps.replay[2]) == 4


@pytest.mark.parametrize("stage", list(SuspendStage))
def test_a_stop_is_no_fault_however_its_workers_end(stage: SuspendStage) -> None:
    run = stepping()
    if stage is SuspendStage.FINISH_STEP:
        saved(run)
    else:
        suspend(run, stage)
    if stage is SuspendStage.LEAVE_STEP:
        run.checkpoint()
    run.observe("p0", "stopped")
    run.die("p1", "exit")
    run.die("r0", "exit")
    run.register("p2")  # it was still starting
    run.die("p2", "exit")
    assert faults(run) == []
    assert views.counts(run.state).leased == 0
    # A task whose owner was stopped with the fleet has not failed.
    assert all(not t.failures for t in run.state.tasks.records.values())


def test_going_on_redoes_nothing_that_the_checkpoint_covers() -> None:
    run = stepping()
    saved(run)
    for worker in ("p0", "p1", "r0"):
        run.observe(worker, "stopped")
    run.failover()
    # The next fleet may be up before it is told to go on: its workers wait.
    run.register("p0")
    run.observe("p0")
    assert run.told("p0") == "running"
    assert not run.directive("p0").HasField("mesh")
    run.do(cmd.go_on("go-on"))
    mesh = run.directive("p0").mesh
    assert (mesh.restore, mesh.step) == (True, 2)
    run.observe("p0", state=run.state.versions.version)
    run.rollout("r0")
    run.train()
    assert run.state.versions.step == 3
    assert faults(run) == []
    assert "RolledBack" not in [e["type"] for e in run.journal]


def test_a_run_that_ends_for_good_can_leave_its_step_and_then_its_checkpoint() -> None:
    run = stepping()
    run.do(cmd.stop("enough", "enough"))
    suspend(run, "leave_step")
    assert (run.directive("p0").leave_step, run.directive("p0").checkpoint_step) == (True, 1)
    suspend(run, "at_once")
    assert views.phase(run.state) == "finished"
    assert (run.state.versions.step, run.state.reason) == (0, "enough")


def test_a_stop_does_not_wait_for_a_state_that_is_initial_or_that_nobody_holds() -> None:
    run = Driven.fleet("p0")
    suspend(run)
    assert views.phase(run.state) == "suspended"
    run = stepping()
    suspend(run)
    run.die("p0")
    run.die("p1")
    assert views.phase(run.state) == "suspended"


def test_a_stop_under_way_can_be_taken_back() -> None:
    run = stepping()
    suspend(run)
    run.do(cmd.go_on("go-on"))
    assert views.phase(run.state) == "running"
    assert run.lease("r0", 1).leases
    with pytest.raises(cmd.CommandRefused, match="has not been stopped for now"):
        run.do(cmd.go_on("again"))


def test_a_paused_run_that_is_stopped_at_once_is_paused_when_it_goes_on() -> None:
    run = stepping()
    run.do(cmd.pause("pause", True))
    suspend(run, "at_once")
    assert views.phase(run.state) == "suspended"
    assert run.event(ev.RunSuspended).checkpoint_step == 0
    run.do(cmd.go_on("go-on"))
    assert run.state.paused


def test_a_run_that_was_stopped_for_now_can_be_ended_for_good() -> None:
    run = stepping()
    saved(run)
    run.do(cmd.stop("enough", "enough"))
    assert views.phase(run.state) == "finished"
