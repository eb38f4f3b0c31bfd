"""Groups whose payload is lost or wrong: they are generated again, and counted in nothing that was
trained."""

import pytest

from controller.ledger import events as ev
from controller.ledger import views
from controller.ledger.state.tasks import TaskState
from tests.unit.ledger.test_rejected_groups import fleet, reject, shard_of


@pytest.mark.parametrize("fault", ["payload_lost", "payload_invalid"])
def test_a_lost_group_is_leased_again_before_any_new_one(fault: str) -> None:
    run = fleet("p0", "p1")
    run.fill("r0", 5, lengths=(7, 13))
    epoch = run.state.fleet.mesh_epoch
    bad = shard_of(run, "p1")[0]
    assert reject(run, "p1", bad, fault=fault) == 1
    lost = run.event(ev.GroupLost)
    assert (lost.task_id, lost.attempt, lost.fault, lost.worker_id) == (bad, 1, fault, "r0")
    assert lost.detail == "p1: why", "who found it"
    assert lost.lengths == (12, 18), "prompt included"
    assert "sequences of 12 and 18 tokens" in lost.text()
    task = run.state.tasks.records[bad]
    assert (task.state, task.group) == (TaskState.PENDING, None)
    assert views.counts(run.state).dropped == {}
    assert run.state.steps.open.mesh_epoch > epoch, "votes for the former composition are void"
    (lease,) = run.lease("r0", 1).leases
    assert (lease.task_id, lease.attempt) == (bad, 2)


@pytest.mark.parametrize("lost", [("t2",), ("t0", "t1", "t2", "t3")])
def test_groups_that_are_lost_are_trained_once_they_were_generated_again(
    lost: tuple[str, ...],
) -> None:
    run = fleet("p0", max_staleness=0)
    run.fill("r0", 4)
    assert reject(run, "p0", *lost, fault="payload_lost") == len(lost)
    assert run.state.steps.open is None, "it misses a group"
    run.fill("r0", len(lost))
    assert set(run.state.steps.open.groups) == {"t0", "t1", "t2", "t3"}
    run.vote("p0")
    assert run.state.versions.step == 1
    assert run.state.tasks.records["t2"].group.attempt == 2


def test_what_the_store_still_has_of_a_lost_group_is_deleted() -> None:
    run = fleet("p0")
    run.fill("r0", 5)
    run.ledger.take_garbage()
    reject(run, "p0", "t1", fault="payload_invalid")
    assert run.ledger.take_garbage() == [("t1", 1)]


def test_a_group_that_is_lost_again_and_again_is_dropped_with_the_reason() -> None:
    run = fleet("p0", max_staleness=0)
    run.fill("r0", 4)
    for _ in range(run.state.run.max_attempts - 1):
        reject(run, "p0", "t2", fault="payload_lost")
        run.fill("r0", 1)
    reject(run, "p0", "t2", fault="payload_lost")
    assert views.counts(run.state).dropped == {"payload_lost": 1}
    assert "t2" not in run.state.tasks.records
