"""Desired counts: bounded, idempotent, and moved together with a drain in one event."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.ledger import decisions as cmd
from controller.ledger import events as ev
from tests.fixtures.ledgers import Driven, run_spec

BOUNDS = {
    "policy_min": 1,
    "policy_max": 3,
    "rollout_min": 2,
    "rollout_max": 4,
    "scorers_min": 1,
    "scorers_max": 3,
    "scorer:short_planned": 1,
}
DESIRED = {"policy": 2, "rollout": 3, "scorer:helpful": 2, "scorer:short": 1}


def bounded() -> Driven:
    run = Driven(desired=DESIRED, bounds=BOUNDS)
    run.policy("p0", "p1")
    run.rollout("r0", "r1", "r2")
    for worker_id in ("scorer-helpful-0", "scorer-helpful-1", "scorer-short-0"):
        run.register(worker_id, scorer=worker_id.split("-")[1], address="127.0.0.1:1")
        run.observe(worker_id)
    return run


@pytest.mark.parametrize(
    ("desired", "why"),
    [
        ({"policy": 4}, "policy=4 is above fleet.policy_max = 3"),
        ({"rollout": 1}, "rollout=1 is below fleet.rollout_min = 2"),
        ({"policy": 3, "rollout": 5}, "rollout=5 is above fleet.rollout_max = 4"),
        ({"policy": 0}, "policy=0: at least 1"),
        ({"rollout": 10**9}, "at most 10000"),
        ({"trainer": 2}, "there is no role 'trainer'"),
        ({}, "no count given"),
        ({"scorer:helpful": 4}, r"scorer:helpful=4 is above fleet\.scorers_max = 3"),
        ({"scorer:helpful": 0}, "scorer:helpful=0: at least 1"),
        ({"scorer:other": 1}, "scorer:other"),
        ({"scorer:short": 2}, r"scorer:short=2: .* planned for 1\..* fleet\.scorers"),
    ],
)
def test_a_scale_out_of_bounds_is_refused_with_the_bound_and_changes_nothing(
    desired: dict[str, int], why: str
) -> None:
    run = bounded()
    with pytest.raises(cmd.CommandRefused, match=why):
        run.do(cmd.scale("x", desired))
    assert run.state.desired == DESIRED


def test_one_pool_is_scaled_once_and_the_others_are_not() -> None:
    run = bounded()
    reply = run.do(cmd.scale("x", {"scorer:helpful": 3}))
    assert "scorer:helpful=3" in reply
    run.failover()
    assert run.do(cmd.scale("x", {"scorer:helpful": 3})) == reply
    assert run.state.desired == {**DESIRED, "scorer:helpful": 3}


@pytest.mark.parametrize(
    ("worker_id", "pool"),
    [("p1", "policy"), ("r2", "rollout"), ("scorer-helpful-1", "scorer:helpful")],
)
def test_a_drain_lowers_the_desired_count_of_its_pool_in_the_same_event_and_once(
    worker_id: str, pool: str
) -> None:
    run = bounded()
    reply = run.do(cmd.drain("d", worker_id))
    assert run.event(ev.Drained).desired == {pool: DESIRED[pool] - 1}
    assert f"{pool}={DESIRED[pool] - 1}" in reply
    run.failover()
    assert run.do(cmd.drain("d", worker_id)) == reply
    run.do(cmd.drain("another", worker_id))
    assert run.state.desired == {**DESIRED, pool: DESIRED[pool] - 1}


@pytest.mark.parametrize(
    ("worker_id", "bound"),
    [("r2", r"fleet\.rollout_min = 2"), ("scorer-short-0", r"fleet\.scorers_min = 1")],
)
def test_a_drain_below_the_least_is_refused_unless_the_worker_is_replaced(
    worker_id: str, bound: str
) -> None:
    """Scorers of another name cannot stand in for the last of a pool."""
    run = bounded()
    run.do(cmd.drain("first", "r1"))
    desired = dict(run.state.desired)
    with pytest.raises(cmd.CommandRefused, match=bound):
        run.do(cmd.drain("d", worker_id))
    assert not run.state.fleet.workers[worker_id].drain
    run.do(cmd.drain("e", worker_id, replace=True))
    assert run.state.fleet.workers[worker_id].drain and run.state.desired == desired


def test_draining_one_of_a_surplus_leaves_the_desired_count_as_it_is() -> None:
    run = Driven.fleet("r0", "r1")
    run.do(cmd.drain("d", "r1"))
    assert run.state.desired["rollout"] == 1


def test_the_death_of_a_scorer_returns_no_task() -> None:
    run = bounded()
    (lease,) = run.lease("r0").leases
    run.die("scorer-helpful-0")
    assert "TaskReleased" not in run.names()
    run.failover()
    assert run.submit("r0", lease).code == "accepted"


def test_a_later_leaders_bounds_hold_and_move_the_desired_counts_into_them() -> None:
    run = bounded()
    narrower = run_spec(desired=DESIRED, bounds={**BOUNDS, "rollout_max": 2})
    run.do(cmd.start_run(narrower))
    assert run.names() == ["BoundsSet", "Scaled"]
    assert run.state.desired == {**DESIRED, "rollout": 2}
    run.do(cmd.start_run(narrower))
    assert run.names() == []
    run.failover()
    with pytest.raises(cmd.CommandRefused, match=r"rollout_max = 2"):
        run.do(cmd.scale("x", {"rollout": 3}))


def test_a_replica_with_another_number_of_ranks_is_refused_by_name() -> None:
    run = Driven.fleet("p0")
    with pytest.raises(
        cmd.CommandRefused, match=r"p1 has 2 ranks, p0 of this run has 1: .*policy_ranks"
    ):
        run.register("p1", ranks=2)
    run.register("r0", ranks=1)
    run.die("p0")
    run.register("p1", ranks=2)


requests = st.lists(
    st.one_of(
        st.tuples(
            st.just("scale"),
            st.sampled_from(["policy", "rollout"]),
            st.integers(min_value=-1, max_value=6),
        ),
        st.tuples(st.just("drain"), st.sampled_from(["p0", "p1", "r0", "r1", "r2"]), st.booleans()),
        st.just(("failover", "", 0)),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(requests)
def test_no_sequence_of_requests_and_failovers_leaves_the_bounds(script: list) -> None:
    run = bounded()
    for number, (kind, what, value) in enumerate(script):
        try:
            if kind == "failover":
                run.failover()
            elif kind == "scale":
                run.do(cmd.scale(str(number), {what: value}))
            else:
                run.do(cmd.drain(str(number), what, bool(value)))
        except cmd.CommandRefused:
            pass
        assert 1 <= run.state.desired["policy"] <= 3
        assert 2 <= run.state.desired["rollout"] <= 4


def test_a_scale_that_expects_other_numbers_is_refused_unless_it_is_a_repeat() -> None:
    run = bounded()
    done = run.do(cmd.scale("a", {"rollout": 4}, expected={"rollout": 3}))
    with pytest.raises(
        cmd.CommandRefused,
        match=r"conflict: .* now policy=2, rollout=4.*; re-read the status and retry",
    ) as refused:
        run.do(cmd.scale("b", {"rollout": 2}, expected={"rollout": 3}))
    assert refused.value.code == "changed"
    assert run.do(cmd.scale("a", {"rollout": 4}, expected={"rollout": 3})) == done
    run.do(cmd.scale("c", {"policy": 3}, expected={"policy": 2}))
    assert run.state.desired == {**DESIRED, "policy": 3, "rollout": 4}


def test_a_drain_meant_for_a_process_that_was_replaced_drains_nobody() -> None:
    run = bounded()
    seen = run.current["r0"]
    run.rollout("r0")
    with pytest.raises(
        cmd.CommandRefused,
        match="conflict: r0 is another process now; re-read the status and retry",
    ) as refused:
        run.do(cmd.drain("d", "r0", replace=True, incarnation=seen))
    assert refused.value.code == "changed" and not run.state.fleet.workers["r0"].leaving
    run.do(cmd.drain("d", "r0", replace=True, incarnation=run.current["r0"]))
    assert run.state.fleet.workers["r0"].leaving
