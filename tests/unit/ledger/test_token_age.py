"""Late groups: which of their tokens are trained, in which order, and when a group is too old."""

from typing import Any

import pytest

from controller.ledger import decisions as cmd
from controller.ledger import events as ev
from controller.ledger import views
from controller.ledger.specs import StatValue
from paceline.ids import TaskId
from paceline.v1 import policy_pb2
from tests.fixtures.ledgers import Driven


def fleet(**changes: Any) -> Driven:
    """Steps of two groups. r1 is slow, r0 is not."""
    return Driven.fleet(
        "p0",
        "r0",
        "r1",
        **{"groups_per_step": 2, "max_staleness": 2, "max_token_age": 3, **changes},
    )


def plan(run: Driven) -> policy_pb2.StepPlan:
    kind, found = run.ask("p0")
    assert kind == "open"
    return found


def test_a_late_group_is_trained_and_its_old_tokens_are_masked() -> None:
    run = fleet()
    (late,) = run.lease("r1").leases
    for _ in range(4):
        run.train()
    spans = {"token_versions": ((0, 15), (1, 3), (4, 7)), "tokens": 25, "max_version": 4}
    assert run.submit("r1", late, 0, **spans).code == "accepted"
    run.fill("r0", 1)
    open_plan = plan(run)
    assert late.task_id in run.state.steps.open.groups and open_plan.step == 5
    assert open_plan.oldest_step == 1, "5 - 1 - max_token_age"
    assert open_plan.total_tokens == 20 + 10
    run.vote("p0")
    metrics = run.event(ev.StepCommitted).metrics
    assert metrics["tokens"] == 30 and metrics["staleness_max"] == 3
    assert metrics["late_share"] == 0.5 and metrics["masked_share"] == pytest.approx(15 / 45)
    assert metrics["late_response_tokens_mean"] == metrics["masked_response_tokens_mean"] == 12.5
    assert metrics["response_tokens_mean"] == 45 / 4 and metrics["dropped_share"] == 0
    assert "dropped_response_tokens_mean" not in metrics
    ages = {name: share for name, share in metrics.items() if name.startswith("token_age_")}
    assert len(ages) == 8 and sum(ages.values()) == pytest.approx(1.0)
    assert ages["token_age_0"] == pytest.approx(27 / 30)
    assert ages["token_age_3_4"] == pytest.approx(3 / 30)


def test_a_sequence_without_a_token_within_the_age_is_none_of_the_steps() -> None:
    """With sequence_mean each of them takes its share of the loss, and gives it nothing."""
    run = fleet()
    (late,) = run.lease("r1").leases
    for _ in range(4):
        run.train()
    spans = {"token_versions": ((0, 15), (4, 10)), "tokens": 25, "max_version": 4}
    by_sequence = {"sequence_versions": (((0,), 1), ((0, 4), 1))}
    assert run.submit("r1", late, 0, **spans, **by_sequence).code == "accepted"
    run.fill("r0", 1)
    assert plan(run).total_sequences == 2 + 1
    run.failover()
    assert plan(run).total_sequences == 2 + 1


def test_a_group_without_a_token_within_the_age_is_expired_on_arrival_and_replaced() -> None:
    run = fleet()
    (late,) = run.lease("r1").leases
    for _ in range(4):
        run.train()
    assert run.submit("r1", late, 0).code == "too_stale"
    run.failover()
    assert run.submit("r1", late, 0).code == "too_stale"
    assert views.counts(run.state).dropped == {"expired": 1}
    run.train()
    metrics = run.event(ev.StepCommitted).metrics
    assert metrics["dropped_share"] == pytest.approx(1 / 3)
    assert metrics["dropped_response_tokens_mean"] == 10
    run.train()
    assert run.event(ev.StepCommitted).metrics["dropped_share"] == 0


@pytest.mark.parametrize(("late_groups", "reason"), [("train", "expired"), ("drop", "stale")])
def test_a_ready_group_is_dropped_before_the_step_that_could_not_train_it(
    late_groups: str, reason: str
) -> None:
    run = fleet(late_groups=late_groups)
    late = run.lease("r1", 4).leases
    for _ in range(3 if late_groups == "train" else 2):
        run.train()
    run.do(cmd.pause("a", True))
    for lease in late:  # all four have the last chance in the next step, which takes two
        assert run.submit("r1", lease, 0).code == "accepted"
    run.do(cmd.pause("b", False))
    assert run.state.steps.open.groups == (late[0].task_id, late[1].task_id)
    run.vote("p0")
    assert run.names().count("TaskDropped") == 2 and run.state.steps.open is None
    assert views.counts(run.state).dropped == {reason: 2}


def test_steps_take_the_oldest_leases_first_not_the_first_groups() -> None:
    run = fleet()
    slow, fast = run.lease("r1", 2).leases, run.lease("r0", 4).leases
    run.do(cmd.pause("a", True))
    for lease in (*fast, *slow):
        owner = "r1" if lease in slow else "r0"
        run.submit(owner, lease, 0)
    run.do(cmd.pause("b", False))
    assert run.state.steps.open.groups == tuple(lease.task_id for lease in slow)


@pytest.mark.parametrize(
    ("late_groups", "spans", "goes_on"),
    [
        ("train", (0, 4), True),
        ("train", (0, 1), True),
        ("train", (0, 0), False),
        ("drop", (0, 4), False),
        ("drop", (2, 4), True),
    ],
)
def test_a_slow_sample_goes_on_with_the_tokens_that_it_has(
    late_groups: str, spans: tuple[int, int], goes_on: bool
) -> None:
    """After the death of its owner, four steps after it began."""
    run = fleet(late_groups=late_groups)
    (late,) = run.lease("r1").leases
    for _ in range(4):
        run.train()
    first, last = views.oldest_fresh(run.state, TaskId(late.task_id))
    assert (spans[0] >= first and spans[1] >= last) == goes_on


def test_no_lateness_takes_a_running_task_from_its_worker() -> None:
    run = fleet()
    (late,) = run.lease("r1").leases
    held = [(late.task_id, late.attempt)]
    for _ in range(8):
        run.train()
    assert not run.directive("r1", held=held).cancelled


@pytest.mark.parametrize(
    "stats",
    [
        {"ratio_square": StatValue(1.0, 1.0, 1.0)},
        {"ratio": StatValue(1e200, 1.0, 1.0), "ratio_square": StatValue(1e300, 0.0, 1.0)},
        {"ratio": StatValue(1e200, 1.0, 1.0), "ratio_square": StatValue(1e300, 9e9, 1.0)},
    ],
)
def test_a_replica_that_reports_nonsense_commits_its_step_all_the_same(stats: Any) -> None:
    run = fleet()
    run.fill("r0", 2)
    run.vote("p0", stats=stats)
    assert "ess" not in run.event(ev.StepCommitted).metrics


def test_after_a_rollback_a_newer_version_may_be_the_older_state() -> None:
    run = fleet()
    (late,) = run.lease("r1").leases
    for _ in range(4):
        run.train()
    run.die("p0")
    run.policy("p0")
    assert (run.state.versions.step, run.state.versions.version) == (0, 5)
    for _ in range(4):
        run.vote("p0")
    mixed = {"token_versions": ((3, 5), (5, 15)), "max_version": 5}
    assert run.submit("r1", late, 3, **mixed).code == "accepted"
    run.fill("r0", 1)
    assert plan(run).oldest_step == 1 and plan(run).total_tokens == 20 + 5, "5 is the initial state"
