"""Leases, groups and returns: what happens to a task under retries, deaths and failovers."""

import pytest

from controller.ledger import decisions as cmd
from controller.ledger import events as ev
from controller.ledger import views
from paceline.dataset.data_order import task_seed
from tests.fixtures.ledgers import Driven, group


@pytest.fixture
def run() -> Driven:
    return Driven.fleet("p0", "r0", "r1")


def test_a_retried_lease_request_gets_the_same_tasks_across_a_failover(run: Driven) -> None:
    first = run.lease("r0", 3)
    retry = cmd.lease("r0", run.current["r0"], run.seqs["r0"], 3, 0)
    assert run.do(retry) == first
    run.failover()
    assert run.do(retry) == first
    assert views.counts(run.state).leased == 3
    assert {t.task_id for t in run.lease("r0", 3).leases}.isdisjoint(
        t.task_id for t in first.leases
    )


def test_an_overtaken_lease_request_is_refused(run: Driven) -> None:
    run.lease("r0")
    run.lease("r0")
    with pytest.raises(cmd.CommandRefused, match="older"):
        run.do(cmd.lease("r0", run.current["r0"], 1, 1, 0))


def test_a_repeated_submission_counts_once_across_a_failover(run: Driven) -> None:
    (lease,) = run.lease("r0").leases
    assert run.submit("r0", lease).code == "accepted"
    assert run.submit("r0", lease).code == "duplicate"
    run.failover()
    assert run.submit("r0", lease).code == "duplicate"
    assert views.counts(run.state).ready == 1


def test_a_repeated_submission_is_a_duplicate_even_after_its_step_is_covered(run: Driven) -> None:
    leases = run.fill("r0", 4)
    run.train()
    run.checkpoint()
    run.train()
    assert leases[0].task_id not in run.state.tasks.records
    assert run.submit("r0", leases[0]).code == "duplicate"
    older = group(leases[0], attempt=0)
    assert run.do(cmd.accept("r0", run.current["r0"], older)).code == "unknown_task"


def test_only_the_owner_of_the_present_attempt_ends_a_task(run: Driven) -> None:
    (lease,) = run.lease("r0").leases
    for verdict in (run.submit("r1", lease), run.return_task("r1", lease, "hand_back")):
        assert verdict.code == "superseded" and run.names() == []
    run.return_task("r0", lease, "hand_back")
    assert run.submit("r0", lease).code == "superseded"
    (again,) = run.lease("r0").leases
    assert (again.task_id, again.attempt) == (lease.task_id, 2)
    assert run.submit("r0", lease).code == "superseded"
    assert run.submit("r0", again).code == "accepted"
    for task_id, attempt in (again.task_id, again.attempt), ("t99", 1):
        run.do(cmd.expire(task_id, attempt))
        assert run.names() == [], "it has moved on"


def test_a_submission_of_a_task_never_dispatched_is_unknown(run: Driven) -> None:
    (lease,) = run.lease("r0").leases
    for task_id in ("t7", "t-1", "t01", "e0.0", "x", "", "t", "e1", "t١"):
        unknown = group(lease, task_id=task_id)
        verdict = run.do(cmd.accept("r0", run.current["r0"], unknown))
        assert verdict.code == "unknown_task", task_id
        assert run.names() == []
    future = group(lease, attempt=2)
    assert run.do(cmd.accept("r0", run.current["r0"], future)).code == "unknown_task"


@pytest.mark.parametrize(
    "changes",
    [
        {"min_version": 1, "max_version": 1},
        {"min_version": -1},
        {"sequences": 3},
        {"tokens": 0},
    ],
)
def test_an_implausible_group_changes_nothing(run: Driven, changes: dict[str, int]) -> None:
    (lease,) = run.lease("r0").leases
    assert run.submit("r0", lease, **changes).code == "invalid"
    assert run.names() == []
    assert run.submit("r0", lease).code == "accepted"


def test_a_dead_owners_tasks_go_out_first_and_in_order(run: Driven) -> None:
    lost = run.lease("r0", 3).leases
    run.lease("r1", 2)
    run.die("r0")
    assert views.counts(run.state).pending == 3
    again = run.lease("r1", 4).leases
    assert [t.task_id for t in again[:3]] == [t.task_id for t in lost]
    assert [t.attempt for t in again] == [2, 2, 2, 1]
    assert [t.seed for t in again[:3]] == [t.seed for t in lost]


def test_a_poisoned_task_is_quarantined_with_its_reasons(run: Driven) -> None:
    (lease,) = run.lease("r0").leases
    run.return_task("r0", lease, "failed", "reward_error")
    run.lease("r0")
    run.die("r0", "exit")
    run.rollout("r0")
    run.lease("r1")
    (third,) = [t for t in run.state.tasks.records.values() if t.task_id == lease.task_id]
    assert third.attempt == 3
    run.die("r1", "lease")
    dropped = run.event(ev.TaskDropped)
    assert (dropped.task_id, dropped.reason) == (lease.task_id, "quarantined")
    assert dropped.detail == "r0: reward_error; r0: owner_died exit; r1: owner_died lease"
    assert views.counts(run.state).dropped == {"quarantined": 1}


def test_a_reason_that_repeats_is_said_once(run: Driven) -> None:
    for _ in range(3):
        (lease,) = run.lease("r0").leases
        run.return_task("r0", lease, "failed", "reward_error")
    assert run.event(ev.TaskDropped).detail == "3 times r0: reward_error"


def test_hand_backs_and_lost_leases_never_quarantine(run: Driven) -> None:
    for _ in range(5):
        (lease,) = run.lease("r0").leases
        run.return_task("r0", lease, "hand_back", "draining")
    for _ in range(5):
        (lease,) = run.lease("r0").leases
        run.do(cmd.expire(lease.task_id, lease.attempt))
    (lease,) = run.lease("r0").leases
    assert (lease.task_id, lease.attempt) == ("t0", 11)


def test_a_task_that_can_never_succeed_is_dropped_at_once_and_once(run: Driven) -> None:
    (lease,) = run.lease("r0").leases
    assert run.return_task("r0", lease, "drop", "prompt_too_long").code == "accepted"
    assert run.return_task("r0", lease, "drop", "prompt_too_long").code == "duplicate"
    assert views.counts(run.state).dropped == {"prompt_too_long": 1}


@pytest.mark.parametrize(
    ("staleness", "steps", "expected"), [(0, 10, 4), (1, 10, 8), (3, 10, 16), (4, 1, 4)]
)
def test_admission_is_exact(staleness: int, steps: int, expected: int) -> None:
    """And no more is leased than the steps of the run need."""
    run = Driven.fleet("p0", "r0", "r1", max_staleness=staleness, steps=steps)
    assert len(run.lease("r0", 100).leases) == expected
    assert run.lease("r1", 1).empty_reason == "staleness"


def test_admission_counts_what_is_in_flight_and_never_leaks() -> None:
    run = Driven.fleet("p0", "r0", max_staleness=0)
    for _ in range(20):
        leases = run.lease("r0", 100).leases
        assert len(leases) == 4
        for lease in leases:
            run.return_task("r0", lease, "hand_back")
    run.fill("r0", 4)
    assert run.lease("r0", 100).empty_reason == "staleness"


def test_a_worker_with_old_weights_is_told_that_weights_are_the_reason(run: Driven) -> None:
    run.train()
    run.fill("r0", 4)
    assert run.lease("r0", 1, version=0).empty_reason == "weights"
    assert run.lease("r0", 1, version=-1).empty_reason == "weights"
    assert run.lease("r0", 1, version=1).leases


def test_a_fault_that_hits_every_task_fails_the_run_and_names_itself() -> None:
    """The data set has no end: without this, tasks would be dropped for ever and no step come."""
    run = Driven.fleet("p0", "r0", groups_per_step=8, max_attempts=1)
    for number in range(23):
        (lease,) = run.lease("r0").leases
        run.return_task("r0", lease, "failed", f"reward_error {number}")
    run.failover()
    assert not run.state.ended
    (lease,) = run.lease("r0").leases
    run.return_task("r0", lease, "drop", "prompt_too_long")
    assert run.names()[-1] == "RunFailed"
    assert "24 tasks in a row" in run.state.reason and "prompt_too_long" in run.state.reason
    run.failover()
    assert run.state.phase == "failed"


@pytest.mark.parametrize("fruit", ["accepted", "uninformative"])
def test_one_group_in_between_is_enough_to_go_on(fruit: str) -> None:
    run = Driven.fleet("p0", "r0", groups_per_step=8, max_attempts=1, filter_uninformative=True)
    for number in range(60):
        (lease,) = run.lease("r0").leases
        if number % 20 == 19:
            run.submit("r0", lease, reward_std=0.0 if fruit == "uninformative" else 0.5)
        else:
            run.return_task("r0", lease, "drop", "prompt_too_long")
    assert not run.state.ended
    assert run.state.tasks.fruitless == 0


def test_a_group_that_comes_too_late_is_dropped_counted_and_replaced() -> None:
    run = Driven.fleet("p0", "r0", "r1", max_staleness=0)
    (late,) = run.lease("r1").leases
    run.fill("r0", 3)
    run.do(cmd.expire(late.task_id, late.attempt))
    (again,) = run.lease("r1").leases
    run.fill("r0", 1)
    assert run.submit("r1", again).code == "accepted"
    run.train()
    (late,) = run.lease("r1").leases
    assert run.submit("r1", late, version=0).code == "too_stale"
    assert run.submit("r1", late, version=0).code == "too_stale"
    run.failover()
    assert run.submit("r1", late, version=0).code == "too_stale"
    assert views.counts(run.state).dropped == {"stale": 1}
    assert len(run.lease("r0", 100).leases) == 4


@pytest.mark.parametrize(("filtered", "expected"), [(False, 0.25), (True, 0.2)])
def test_groups_of_equal_rewards_are_a_share_of_all_that_were_made(
    filtered: bool, expected: float
) -> None:
    run = Driven.fleet("p0", "r0", filter_uninformative=filtered)
    (lease,) = run.lease("r0").leases
    assert run.submit("r0", lease, reward_std=0.0).code == "accepted"
    assert run.submit("r0", lease, reward_std=0.0).code == "duplicate"
    assert views.counts(run.state).dropped == ({"uninformative": 1} if filtered else {})
    run.fill("r0", 4 if filtered else 3)
    run.train()
    assert run.state.steps.metrics["zero_variance_share"] == pytest.approx(expected)
    assert run.state.steps.metrics.get("uninformative_share", 0.0) == (0.2 if filtered else 0.0)


def test_nothing_is_leased_while_paused_draining_or_stopping(run: Driven) -> None:
    run.do(cmd.pause("a", True))
    assert run.lease("r0").empty_reason == "paused"
    run.do(cmd.pause("b", False))
    run.do(cmd.drain("c", "r0"))
    assert run.lease("r0").empty_reason == "stopped"
    run.fill("r1", 4)  # a step is open: the run cannot end yet
    run.do(cmd.stop("d", "enough"))
    assert run.lease("r1").empty_reason == "stopped"


def test_sampling_seeds_differ_between_tasks_and_runs() -> None:
    seeds = {task_seed(run, f"t{n}") for run in range(3) for n in range(100_000, 100_400)}
    assert len(seeds) == 1200


def test_finished_tasks_leave_the_memory() -> None:
    run = Driven.fleet("p0", "r0", steps=10_000, checkpoint_every=10)
    run.ledger.checked = False
    sizes = []
    for step in range(1, 61):
        run.train()
        if step % 10 == 0:
            run.checkpoint()
            run.train()
            sizes.append(len(run.ledger.fingerprint()))
    assert sizes[-1] < sizes[0] * 3
    assert len(run.state.tasks.records) == 4
