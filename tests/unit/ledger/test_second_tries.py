"""The tail of a step: a slow task gets a second try on an idle worker, and is counted once."""

from __future__ import annotations

import json

import pytest

from controller.ledger import Ledger, views
from controller.ledger import commands as cmd
from controller.ledger import events as ev
from tests.fixtures.ledgers import Driven, group

SLOW_S = 3.0
"""Groups of these tests take 1.1 s by their own account; twice that is slow."""


def fleet(**changes: object) -> Driven:
    values: dict[str, object] = {"max_staleness": 0, "speculative_after": 2.0, **changes}
    run = Driven(**values)
    run.policy("p0")
    run.rollout("r0", "r1", "r2")
    return run


def tail(run: Driven, left: int = 1) -> list[cmd.LeasedTask]:
    """r0 has leased the whole step and handed in all but its last ``left`` groups; time has passed."""
    leases = list(run.lease("r0", 100).leases)
    for lease in leases[:-left]:
        assert run.submit("r0", lease, run.state.versions.version).code == "accepted"
    run.now += SLOW_S
    return leases[-left:]


@pytest.fixture
def run() -> Driven:
    return fleet()


def test_the_task_a_step_waits_for_is_leased_again_to_an_idle_worker(run: Driven) -> None:
    (slow,) = tail(run)
    (second,) = run.lease("r1").leases
    assert (second.task_id, second.attempt, second.seed) == (slow.task_id, 2, slow.seed)
    counts = views.counts(run.state)
    assert (counts.dispatched, counts.leased, counts.pending) == (4, 1, 0)
    assert run.lease("r2").empty_reason == "staleness", "two tries are enough"


@pytest.mark.parametrize(("winner", "loser"), [("r0", "r1"), ("r1", "r0")])
def test_the_first_to_finish_wins_and_the_other_is_cancelled(
    run: Driven, winner: str, loser: str
) -> None:
    (slow,) = tail(run)
    (second,) = run.lease("r1").leases
    by = {"r0": slow, "r1": second}
    assert run.submit(winner, by[winner]).code == "accepted"
    assert run.names() == ["LeaseSuperseded", "GroupAccepted", "StepOpened"]
    lost = (by[loser].task_id, by[loser].attempt)
    view = views.directive(run.state, loser, run.current[loser], [lost])
    assert view.cancelled == (lost,)
    run.failover()
    assert run.submit(loser, by[loser]).code == "superseded"
    assert run.submit(winner, by[winner]).code == "duplicate"
    counts = views.counts(run.state)
    assert (counts.dispatched, counts.in_step, counts.leased) == (4, 4, 0)
    assert not run.state.fleet.workers[loser].held


@pytest.mark.parametrize("first", [True, False])
def test_the_payload_is_that_of_the_try_which_was_accepted(run: Driven, first: bool) -> None:
    (slow,) = tail(run)
    (second,) = run.lease("r1").leases
    winner, accepted = ("r0", slow) if first else ("r1", second)
    run.submit(winner, accepted)
    ref = (slow.task_id, accepted.attempt)
    assert views.payload_ref(run.state, slow.task_id) == ref
    step = run.state.steps.open
    _, plan = views.plan(run.state, "p0", run.current["p0"], step.mesh_epoch, 0)
    assert plan is not None and ref in plan.shard
    run.vote("p0")
    run.checkpoint()
    assert ref in run.ledger.take_garbage()
    codes = {
        attempt: run.do(cmd.AcceptGroup("r2", run.current["r2"], group(slow, attempt=attempt))).code
        for attempt in (1, 2, 3)
    }
    other = 3 - accepted.attempt
    assert codes == {accepted.attempt: "duplicate", other: "superseded", 3: "unknown_task"}


@pytest.mark.parametrize("victim", ["r0", "r1"])
def test_the_death_of_one_of_two_owners_leaves_the_task_to_the_other(
    run: Driven, victim: str
) -> None:
    (slow,) = tail(run)
    (second,) = run.lease("r1").leases
    run.die(victim)
    counts = views.counts(run.state)
    assert (counts.leased, counts.pending) == (1, 0)
    run.failover()
    survivor, lease = ("r1", second) if victim == "r0" else ("r0", slow)
    assert run.submit(survivor, lease).code == "accepted"


def test_the_death_of_both_owners_brings_the_task_back_once(run: Driven) -> None:
    (slow,) = tail(run)
    run.lease("r1")
    run.die("r0")
    run.die("r1")
    assert views.counts(run.state).pending == 1
    assert run.state.tasks.records[slow.task_id].deaths == 2
    run.rollout("r1")
    (third,) = run.lease("r1").leases
    assert (third.task_id, third.attempt) == (slow.task_id, 3)
    assert run.submit("r1", third).code == "accepted"


def test_one_of_two_tries_may_be_handed_back_or_expire(run: Driven) -> None:
    (slow,) = tail(run)
    (second,) = run.lease("r1").leases
    assert run.return_task("r1", second, "hand_back").code == "accepted"
    assert run.return_task("r1", second, "hand_back").code == "superseded"
    (third,) = run.lease("r2").leases
    assert third.attempt == 3
    run.do(cmd.ExpireLease(slow.task_id, slow.attempt))
    assert views.counts(run.state).leased == 1
    assert run.submit("r0", slow).code == "superseded"
    assert run.submit("r2", third).code == "accepted"


def test_a_task_that_both_tries_fail_at_is_quarantined_once() -> None:
    run = fleet(max_attempts=2)
    (slow,) = tail(run)
    (second,) = run.lease("r1").leases
    run.return_task("r1", second, "failed", "reward_error")
    assert views.counts(run.state).leased == 1
    run.return_task("r0", slow, "failed", "reward_error")
    assert views.counts(run.state).dropped == {"quarantined": 1}
    assert "r1: reward_error" in run.event(ev.TaskDropped).detail


def test_a_task_that_one_try_finds_hopeless_is_dropped_for_both(run: Driven) -> None:
    (slow,) = tail(run)
    (second,) = run.lease("r1").leases
    run.return_task("r1", second, "drop", "prompt_too_long")
    assert run.names() == ["LeaseSuperseded", "TaskDropped"]
    assert run.submit("r0", slow).code == "superseded"
    assert views.counts(run.state).dropped == {"prompt_too_long": 1}


def test_the_end_of_the_run_ends_both_tries(run: Driven) -> None:
    tail(run)
    run.lease("r1")
    run.do(cmd.Stop("a", "out of disk", failed=True))
    assert run.names().count("LeaseSuperseded") == 1
    assert not any(worker.held for worker in run.state.fleet.workers.values())


def test_nobody_tries_twice_what_is_not_slow_not_awaited_or_not_sound() -> None:
    run = fleet()
    tail(run)
    run.now -= SLOW_S
    assert run.lease("r1").empty_reason == "staleness", "it has only just begun"

    run = fleet(speculative_after=0.0)
    tail(run)
    assert run.lease("r1").empty_reason == "staleness", "off"

    run = fleet()
    tail(run, left=2)
    assert run.lease("r1").empty_reason == "staleness", "too many are missing"

    run = fleet(groups_per_step=8)
    assert len(run.lease("r1", 1).leases) == 1
    tail(run)
    assert run.lease("r1").empty_reason == "staleness", "it has work of its own"
    assert run.lease("r2").leases

    run = fleet()
    (slow,) = tail(run)
    run.return_task("r0", slow, "failed", "reward_error")
    run.lease("r0")
    run.now += SLOW_S
    assert run.lease("r1").empty_reason == "staleness", "it may fail again"


def test_nobody_tries_twice_with_weights_too_old_for_the_step() -> None:
    run = fleet()
    run.train()
    tail(run)
    assert run.lease("r1", version=0).empty_reason == "staleness"
    assert run.lease("r1", version=1).leases


def test_the_longest_running_task_is_tried_first() -> None:
    run = fleet(groups_per_step=8)
    first, *rest = run.lease("r0", 6).leases
    for lease in rest:
        run.submit("r0", lease)
    run.now += 1.0
    _, last = run.lease("r2", 2).leases
    run.submit("r2", last)
    run.now += SLOW_S
    assert [t.task_id for t in run.lease("r1", 1).leases] == [first.task_id]


def test_a_snapshot_knows_of_both_tries(run: Driven) -> None:
    tail(run)
    run.lease("r1")
    copy = Ledger.from_snapshot(json.loads(json.dumps(run.ledger.to_snapshot())))
    assert copy.fingerprint() == run.ledger.fingerprint()
    assert copy.check() == []


def test_a_run_that_ends_drops_the_try_that_still_runs(run: Driven) -> None:
    """The newest had ended with its owner: there was nobody to take the place of the other."""
    (slow,) = tail(run)
    run.lease("r1")
    run.die("r1")
    run.do(cmd.Stop("stop", "enough"))
    assert run.state.ended and "LeaseSuperseded" not in run.names()
    dropped = [e for e in run.last if isinstance(e, ev.TaskDropped) and e.task_id == slow.task_id]
    assert [e.attempt for e in dropped] == [slow.attempt]
