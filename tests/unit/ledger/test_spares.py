"""Spare rollout workers: who stands by, and who is put to work when."""

import pytest

from controller.fleet.autoscale_policy import WorkerCounts
from controller.fleet_loops import settled
from controller.ledger import decisions as cmd
from controller.ledger import events as ev
from paceline.providers.base import NoProvider, desired_of
from paceline.v1 import admin_pb2, common_pb2
from tests.fixtures.ledgers import Driven, run_spec


def fleet(spares: int = 1, rollout: int = 2) -> Driven:
    """``rollout`` workers wanted at work, and as many as that and the spares there."""
    return Driven.fleet(
        "p0",
        *(f"r{n}" for n in range(rollout + spares)),
        desired={"policy": 1, "rollout": rollout},
        bounds={"rollout_spares": spares} if spares else {},
        max_staleness=8,
    )


def spares(run: Driven) -> set[str]:
    workers = run.state.fleet.workers.values()
    return {w.worker_id for w in workers if w.spare and w.alive and not w.leaving}


def test_a_worker_beyond_those_wanted_stands_by_and_gets_weights() -> None:
    run = fleet()
    assert spares(run) == {"r2"}
    assert run.lease("r2").empty_reason == "spare"
    assert run.lease("r0").leases and run.lease("r1").leases
    assert run.state.fleet.links["r2"].publisher == "p0"


@pytest.mark.parametrize("how", ["exit", "lease", "drain"])
def test_a_spare_is_put_to_work_in_the_decision_that_loses_a_worker(how: str) -> None:
    run = fleet()
    lost = run.lease("r0", 2).leases
    if how == "drain":
        run.do(cmd.drain("a", "r0", replace=True))
    else:
        run.die("r0", how)
    assert run.event(ev.SpareSet) == ev.SpareSet("r2", run.current["r2"], False)
    run.failover()
    assert spares(run) == set()
    leased = run.lease("r2", 2).leases
    if how != "drain":
        assert [t.task_id for t in leased] == [t.task_id for t in lost]


def test_the_one_that_comes_back_stands_by() -> None:
    run = fleet()
    run.die("r0")
    run.rollout("r0")
    assert spares(run) == {"r0"}
    assert run.lease("r0").empty_reason == "spare"


def test_a_spare_that_serves_weights_goes_before_one_that_does_not() -> None:
    run = fleet(spares=2)
    assert spares(run) == {"r2", "r3"}
    run.register("r2")  # a new process: its model is being loaded
    run.die("r0")
    assert spares(run) == {"r2"}


def test_more_or_fewer_wanted_at_work_makes_workers_of_spares_and_back() -> None:
    run = fleet()
    run.do(cmd.scale("a", {"rollout": 3}))
    assert spares(run) == set()
    held = run.lease("r2", 1).leases
    run.do(cmd.scale("b", {"rollout": 1}))
    assert spares(run) == {"r1", "r2"}
    assert run.submit("r2", held[0]).code == "accepted", "what it held it finishes"
    assert run.lease("r2").empty_reason == "spare"


def test_a_spare_leaves_without_fewer_being_wanted() -> None:
    run = fleet()
    run.do(cmd.drain("a", "r2"))
    assert run.state.desired["rollout"] == 2
    run.do(cmd.drain("b", "r1"))
    assert run.state.desired["rollout"] == 1


def test_a_leader_that_is_told_of_no_spares_puts_all_to_work() -> None:
    run = fleet()
    wanted = {"policy": 1, "rollout": 2}
    run.do(cmd.start_run(run_spec(desired=wanted, max_staleness=8)))
    assert spares(run) == set()
    run.do(cmd.start_run(run_spec(desired=wanted, max_staleness=8, bounds={"rollout_spares": 1})))
    assert spares(run) == {"r2"}


def test_a_suspect_task_does_not_wait_for_a_spare() -> None:
    """It goes to the first by name of the workers with weights, and a spare leases nothing."""
    run = fleet(rollout=1)
    for _ in range(2):
        worker = next(w for w in ("r0", "r1") if w not in spares(run))
        run.lease(worker, 2)
        run.die(worker)
        run.rollout(worker)
    assert any(t.suspect for t in run.state.tasks.records.values())
    worker = next(w for w in ("r0", "r1") if w not in spares(run))
    assert len(run.lease(worker, 2).leases) == 1


def test_the_autoscaler_takes_the_fleet_for_settled_with_its_spares_standing_by() -> None:
    run = fleet()
    assert settled(run.state, WorkerCounts(1, 2))
    run.die("r2")
    assert settled(run.state, WorkerCounts(1, 2)), "a spare that is missing holds up nothing"
    run.die("r1")
    assert not settled(run.state, WorkerCounts(1, 2))


def status(*workers: str, spares: int = 1) -> admin_pb2.StatusReply:
    reply = admin_pb2.StatusReply(phase="running", desired={"rollout": 2})
    if spares:
        reply.spares["rollout"] = spares
    for name in workers:
        reply.workers.add(worker_id=name, role=common_pb2.ROLE_ROLLOUT, state="running")
    return reply


async def test_a_provider_starts_spares_and_drains_what_is_beyond_them() -> None:
    drained: list[str] = []

    async def drain(worker: admin_pb2.WorkerStatus) -> None:
        drained.append(worker.worker_id)

    provider = NoProvider(drain)
    assert desired_of(status(), "rollout") == 3
    assert "1 of 3 rollout workers" in await provider.converge(status("r-0", "r-1"))
    assert await provider.converge(status("r-0", "r-1", "r-2")) == "" and drained == []
    await provider.converge(status("r-0", "r-1", "r-2", "r-3"))
    assert drained == ["r-3"]
    await provider.converge(status("r-0", "r-1", "r-2", spares=0))
    assert drained == ["r-3", "r-2"]
