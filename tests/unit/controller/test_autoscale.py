"""The autoscaler: within its bounds, calm, never back and forth; also of scorers."""

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.diagnosis.bottleneck import pace_of, scorer_loads
from controller.fleet.autoscale_policy import (
    HIGH,
    LEAST_GAIN,
    Autoscaler,
    Proposal,
    ScaleBounds,
    Waits,
    WorkerCounts,
    propose,
    waiting,
)
from controller.fleet.flow_fractions import FlowAverage
from controller.fleet_loops import Autoscaling
from controller.ledger import decisions as cmd
from paceline.v1 import worker_pb2
from tests.fixtures.configs import config_of
from tests.fixtures.ledgers import Driven

shares = st.floats(min_value=0.0, max_value=1.0)
limits = st.builds(
    lambda p, q, r, s: ScaleBounds((min(p, q), max(p, q)), (min(r, s), max(r, s))),
    *[st.integers(min_value=1, max_value=12) for _ in range(4)],
)
capacities = st.floats(min_value=0.05, max_value=20.0)


def inside(bounds: ScaleBounds, share: tuple[float, float]) -> WorkerCounts:
    pick = [
        least + round(x * ((most or least) - least))
        for (least, most), x in zip((bounds.policy, bounds.rollout), share, strict=True)
    ]
    return WorkerCounts(*pick)


def allowed(bounds: ScaleBounds, counts: WorkerCounts) -> bool:
    return (
        bounds.policy[0] <= counts.policy <= (bounds.policy[1] or 10**9)
        and bounds.rollout[0] <= counts.rollout <= (bounds.rollout[1] or 10**9)
    )  # fmt: skip


def follow(
    bounds: ScaleBounds, counts: WorkerCounts, waits, rounds: int = 60
) -> list[WorkerCounts]:
    """Fleets of a run that carries out every proposal; ``waits(counts)`` is what it measures."""
    scaler = Autoscaler(bounds, steps=3)
    fleets = [counts]
    for _ in range(rounds * 12):
        scaler.observe(fleets[-1], waits(fleets[-1]), settled=True)
        if scaler.proposal is not None:
            fleets.append(scaler.proposal.counts)
    return fleets


def gain(found: Proposal, now: WorkerCounts, waits: Waits) -> float:
    balance = 1 - waits.starved if waits.starved else 1 / (1 - waits.throttled)
    return waiting(balance, now, now) - waiting(balance, now, found.counts)


@given(limits, st.tuples(shares, shares), shares, shares)
def test_a_proposal_is_within_the_bounds_changes_one_role_and_saves_waiting(
    bounds: ScaleBounds, start: tuple[float, float], starved: float, throttled: float
) -> None:
    now = inside(bounds, start)
    found = propose(now, bounds, Waits(starved, throttled))
    if found is None:
        return
    assert max(starved, throttled) >= HIGH
    assert allowed(bounds, found.counts)
    assert (found.counts.policy != now.policy) != (found.counts.rollout != now.rollout)
    assert found.counts.policy <= 2 * now.policy
    assert found.counts.rollout <= 2 * now.rollout


@settings(max_examples=60, deadline=None)
@given(limits, st.tuples(shares, shares), shares, shares)
def test_on_constant_input_no_role_ever_moves_both_ways_and_it_ends(
    bounds: ScaleBounds, start: tuple[float, float], starved: float, throttled: float
) -> None:
    fleets = follow(bounds, inside(bounds, start), lambda _: Waits(starved, throttled))
    assert all(allowed(bounds, fleet) for fleet in fleets)
    for role in ("policy", "rollout"):
        counts = [getattr(fleet, role) for fleet in fleets]
        assert counts in (sorted(counts), sorted(counts, reverse=True))
    assert len(fleets) <= 25, "it has not come to an end"


@settings(max_examples=60, deadline=None)
@given(limits, st.tuples(shares, shares), capacities)
def test_in_a_run_that_answers_to_the_changes_it_settles_without_a_cycle(
    bounds: ScaleBounds, start: tuple[float, float], ratio: float
) -> None:
    """``ratio``: what one rollout worker generates of what one replica trains."""

    def waits(counts: WorkerCounts) -> Waits:
        balance = ratio * counts.rollout / counts.policy
        return Waits(max(0.0, 1 - balance), max(0.0, 1 - 1 / balance))

    fleets = follow(bounds, inside(bounds, start), waits)
    assert len(set(fleets)) == len(fleets), "it came back to a fleet it had left"
    idle = [max(waits(fleet).starved, waits(fleet).throttled) for fleet in fleets]
    assert idle == sorted(idle, reverse=True), "a change made waiting worse"
    found = propose(fleets[-1], bounds, waits(fleets[-1]))
    # A mean of equal numbers may differ from them in the last bit: a gain may be just enough or
    # not.
    assert found is None or gain(found, fleets[-1], waits(fleets[-1])) <= LEAST_GAIN + 1e-9


@pytest.mark.parametrize(
    ("now", "most_policy", "waits", "wanted"),
    [
        # As many as it lacks.
        (WorkerCounts(1, 2), 4, Waits(0.5, 0.0), WorkerCounts(1, 4)),
        # Replicas first, and fewer rollout workers where there can be none.
        (WorkerCounts(1, 4), 4, Waits(0.0, 0.5), WorkerCounts(2, 4)),
        (WorkerCounts(1, 4), 1, Waits(0.0, 0.5), WorkerCounts(1, 2)),
        # A worker more would idle longer than the trainer does.
        (WorkerCounts(1, 1), 1, Waits(0.26, 0.0), None),
    ],
    ids=["starved", "throttled", "no replicas", "too little to gain"],
)
def test_the_slower_role_grows(
    now: WorkerCounts, most_policy: int, waits: Waits, wanted: WorkerCounts | None
) -> None:
    found = propose(now, ScaleBounds((1, most_policy), (1, 8)), waits)
    assert (None if found is None else found.counts) == wanted
    assert found is None or "50% of the time" in found.why


MET = WorkerCounts(1, 2)


def observe(
    scaler: Autoscaler,
    times: int,
    starved: float,
    counts: WorkerCounts = MET,
    settled: bool = True,
) -> Proposal | None:
    for _ in range(times):
        scaler.observe(counts, Waits(starved, 0.0), settled=settled)
    return scaler.proposal


@pytest.fixture
def scaler() -> Autoscaler:
    return Autoscaler(ScaleBounds((1, 4), (1, 8)), steps=3)


def test_one_measurement_is_not_enough_and_a_contradiction_starts_over(scaler: Autoscaler) -> None:
    observe(scaler, 1, 0.5)  # meets the fleet
    assert observe(scaler, 3, 0.5) is None
    assert observe(scaler, 3, 0.0) is None
    assert observe(scaler, 3, 0.5) is None
    assert observe(scaler, 3, 0.5) is not None
    assert observe(scaler, 3, 0.0) is None, "a proposal that no longer holds stays"


def test_after_a_change_it_waits_before_it_measures(scaler: Autoscaler) -> None:
    assert observe(scaler, 7, 0.5) is not None
    more = WorkerCounts(1, 4)
    assert observe(scaler, 20, 0.8, counts=more, settled=False) is None, "workers are starting"
    assert observe(scaler, 3 + 5, 0.5, counts=more) is None
    assert observe(scaler, 1, 0.5, counts=more) is not None


POOL = "scorer:helpful"
FLEET = WorkerCounts(1, 1)
LIMITS = ScaleBounds((1, 4), (1, 4))
MODEL = {"kind": "reward_model", "path": "/rm"}
JUDGE = {"kind": "judge", "url": "http://judge/v1", "model": "j", "batch_size": 8}


def waits(workers: int = 1, starved: float = 0.8, pool: str = POOL) -> Waits:
    return Waits(starved, 0.0, (pool, workers))


@pytest.mark.parametrize(
    ("workers", "starved", "most", "wanted"),
    [
        (1, 0.3, None, 2),
        (4, 0.3, None, 6),  # 4 / 0.7 = 5.7
        (4, 0.9, None, 8),  # at most twice as many
        (4, 0.9, 5, 5),
    ],
)
def test_it_grows_by_what_is_waited_within_its_limits(
    workers: int, starved: float, most: int | None, wanted: int
) -> None:
    limits = replace(LIMITS, scorers=most)
    found = propose(FLEET, limits, waits(workers, starved))
    assert found is not None and found.scorers == {POOL: wanted} and found.counts == FLEET


# ---- in the leader --------------------------------------------------------------------------


FREE_SLOTS = {"slot_occupancy": 0.1, "engine_idle_fraction": 0.9}


def leader_of(run: Driven, scorer: dict[str, Any], queued: float, **fleet: Any) -> Any:
    """Its engines have free slots, and each scorer reports ``queued`` completions."""
    config = config_of(
        scorers={"helpful": scorer},
        fleet={"policy": 1, "rollout": 1, "autoscale_steps": 2, **fleet},
    )
    report = worker_pb2.Report(gauges={**FREE_SLOTS, "queued": queued})
    commands: list[cmd.Command[str]] = []

    async def execute(command: cmd.Command[str]) -> None:
        commands.append(command)

    return SimpleNamespace(
        ledger=run.ledger,
        clock=time,
        sessions=SimpleNamespace(of=lambda *key: SimpleNamespace(report=report)),
        context=SimpleNamespace(config=config),
        group_commit=SimpleNamespace(append_s=0.0),
        flow=FlowAverage(),
        proposal=None,
        commands=commands,
        execute=execute,
    )


def at_work(count: int = 1) -> Driven:
    run = Driven.fleet("p0", "r0", steps=100, desired={"policy": 1, "rollout": 1, POOL: count})
    for index in range(count):
        name = f"scorer-helpful-{index}"
        run.register(name, scorer="helpful", address="127.0.0.1:1")
        run.observe(name)
    run.train("r0")
    run.observe("r0", loaded=1)
    return run


def measured(leader: Any, steps: int = 8) -> Autoscaling:
    autoscaling = Autoscaling(leader)
    metrics = {"step_s": 1.0, "time_wait_s": 0.8}
    for _ in range(steps):
        leader.ledger.state.steps.metrics.update(metrics)
        leader.flow.commit(metrics)
        autoscaling.sample(leader.ledger.state)
        autoscaling.committed(leader.ledger.state, autoscaling.waits(leader.ledger.state))
    return autoscaling


def test_a_model_is_loaded_by_any_request_and_a_judges_url_by_a_batch() -> None:
    run = at_work(2)
    assert scorer_loads(leader_of(run, MODEL, 1.0), run.state) == {POOL: 1.0}
    assert scorer_loads(leader_of(run, MODEL, 0.0), run.state) == {POOL: 0.0}
    assert scorer_loads(leader_of(run, JUDGE, 2.0), run.state) == {POOL: 0.25}
    pace = pace_of(leader_of(run, MODEL, 1.0))
    assert (pace.scorer, pace.scorers) == (POOL, 2)


@pytest.mark.parametrize(
    ("queued", "wanted", "proposed"),
    [(4.0, 1, {POOL: 2}), (0.0, 1, {}), (4.0, 2, {})],
    ids=["all wait for scores", "scorers idle", "one is missing and awaited first"],
)
def test_trainers_that_wait_for_scores_get_more_scorers_and_no_rollout_workers(
    queued: float, wanted: int, proposed: dict[str, int]
) -> None:
    run = at_work()
    run.state.desired[POOL] = wanted
    leader = leader_of(run, MODEL, queued)
    measured(leader)
    assert (leader.proposal.scorers if leader.proposal else {}) == proposed
    if proposed:
        assert leader.proposal.desired == {"policy": 1, "rollout": 1, **proposed}
        assert POOL in leader.proposal.why
    if wanted > 1:
        assert leader.proposal is None


@pytest.mark.parametrize(("free", "proposed"), [(FREE_SLOTS, None), ({"slot_occupancy": 1.0}, 2)])
def test_it_adds_no_rollout_workers_for_a_limit_that_they_do_not_lift(
    free: dict[str, float], proposed: int | None
) -> None:
    """Starved trainers alone once made it double them, and nothing got faster."""
    run = at_work()
    run.lease("r0", 64)  # as many groups as the bound allows
    leader = leader_of(run, MODEL, queued=0.0)
    leader.sessions.of("r0").report.gauges.update({"engine_idle_fraction": 0.0, **free})
    measured(leader)
    assert (leader.proposal and leader.proposal.counts.rollout) == proposed


@pytest.mark.parametrize("most", [None, 4])
async def test_a_proposal_of_scorers_is_applied_only_within_a_limit(most: int | None) -> None:
    limits = {"autoscale": True, "policy_max": 2, "rollout_max": 2, "scorers_max": most}
    leader = leader_of(at_work(), MODEL, queued=4.0, **limits)
    autoscaling = measured(leader)
    await autoscaling.carry_out(leader.ledger.state)
    applied = [dict(command.args[1]) for command in leader.commands]
    assert applied == ([] if most is None else [{"policy": 1, "rollout": 1, POOL: 2}])
