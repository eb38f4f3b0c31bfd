"""The bottleneck of constructed measurements: each limit is told apart, with its remedy."""

from types import SimpleNamespace
from typing import Any

import pytest

from controller.diagnosis.bottleneck import Pace, bottleneck_of, pace_of, reports_of, shares_of
from controller.fleet.flow_fractions import FlowAverage, FlowFractions
from paceline.v1 import worker_pb2
from tests.fixtures.golden import Golden
from tests.fixtures.ledgers import Driven

SLOTS_FREE = {"occupancy": 0.1, "idle": 0.9, "closed": 0.8}
NO_ENGINE = ("engine", "slots", "sample", "reward", "generation")
"""Words for what a run of recorded data does not have."""


def starved(shares: dict[str, float] | None = None, **changes: Any) -> Pace:
    """Trainers that wait for groups most of the time."""
    usual = {"step_s": 2.0, "wait_s": 1.6, "compute_s": 0.3, "generate_s": 1.0, "reward_s": 0.1}
    return Pace(**{**usual, **changes}, shares=FlowFractions(**shares or {}))


def recorded(shares: dict[str, float] | None = None, **changes: Any) -> Pace:
    return starved(shares, **{"generate_s": 0.0, "reward_s": 0.0, "recorded": True, **changes})


def judged(shares: dict[str, float]) -> Pace:
    """Groups that wait for a scorer also count as groups that wait for the reward functions."""
    shares = {**SLOTS_FREE, "scoring": 5.0, **shares}
    return starved(shares, reward_s=0.7, scorer="scorer:helpful", scorers=1)


CASES: dict[str, Pace] = {
    "trainers": starved({"closed": 0.9, "ready": 0.9}, wait_s=0.1, compute_s=1.8),
    "generation": starved({"occupancy": 0.97}),
    "rewards": starved({**SLOTS_FREE, "scoring": 5.0}, reward_s=0.7),
    "scorers": judged({"scorers": 0.95}),
    "scorers with time to spare": judged({"scorers": 0.3}),
    "full engines beside scorers": judged({"scorers": 0.95, "occupancy": 0.95, "scoring": 0.0}),
    # Rewards only wait, so that any number is scored at once.
    "staleness, as a first user met it": starved(
        {"occupancy": 0.05, "idle": 0.9, "closed": 1.0},
        step_s=0.42,
        wait_s=0.37,
        generate_s=0.05,
        reward_s=0.7,
        max_staleness=1,
    ),
    "synchronous": starved({"occupancy": 0.3, "closed": 0.9}, max_staleness=0),
    # Engines that are full whenever trainers wait for them are too few all the same.
    "synchronous with full engines": starved({"occupancy": 0.75, "closed": 0.5}, max_staleness=0),
    "leases": starved({"occupancy": 0.3, "idle": 0.6}, append_s=0.3, lease_s=0.7),
    "commits": starved(step_s=1.0, wait_s=0.1, compute_s=0.1, commit_s=0.8, append_s=0.2),
    "weights": starved(
        {"occupancy": 0.2, "idle": 0.7, "lagging": 0.7}, transfer_s=3.0, max_staleness=1
    ),
    "recorded: tokenising": recorded(),
    "recorded: staleness": recorded({"closed": 0.9}, max_staleness=2),
    "recorded: nothing ahead": recorded(max_staleness=0),
    "recorded: journal": recorded(append_s=0.3),
    "recorded: unsent": recorded({"unsent": 2.0}),
    "recorded: trainers": recorded({"ready": 0.9}, wait_s=0.1),
    "recorded: balanced": recorded(wait_s=0.1),
}


def test_each_limit_is_told_with_the_remedy_that_helps() -> None:
    found = {name: bottleneck_of(pace) for name, pace in CASES.items()}
    for name, each in found.items():
        assert not name.startswith("recorded") or not any(w in each.sentence for w in NO_ENGINE)
    Golden("bottlenecks").check_all(
        {n: f"{each.kind}: {each.sentence}" for n, each in found.items()}
    )


# ---- measurement ----------------------------------------------------------------------------


def leader_of(run: Driven, **gauges: float) -> Any:
    """A leader whose rollout workers all report ``gauges``."""
    report = worker_pb2.Report(gauges=gauges)
    fleet = SimpleNamespace(
        train=SimpleNamespace(max_staleness=run.state.run.max_staleness),
        reward=SimpleNamespace(processes=2),
    )
    return SimpleNamespace(
        ledger=run.ledger,
        sessions=SimpleNamespace(of=lambda *key: SimpleNamespace(report=report)),
        context=SimpleNamespace(config=fleet),
        group_commit=SimpleNamespace(append_s=0.01),
        flow=FlowAverage(),
    )


def shares(run: Driven, **gauges: float) -> FlowFractions:
    return shares_of(run.state, reports_of(leader_of(run, **gauges), run.state))


def test_the_closed_admission_and_engines_without_the_newest_weights_are_measured() -> None:
    run = Driven.fleet("p0", "r0", "r1", max_staleness=0)
    assert shares(run).closed == 0.0
    run.lease("r1", 4)
    assert shares(run).closed == 1.0
    run = Driven.fleet("p0", "r0", "r1", max_staleness=0)
    run.train("r0")
    # The admission is open for version 1; r0 and r1 serve version 0.
    assert shares(run).lagging == 1.0 and shares(run).closed == 0.0
    run.observe("r0", loaded=1)
    assert shares(run).lagging == 0.5


def test_groups_that_wait_to_be_scored_are_measured_against_the_places() -> None:
    run = Driven.fleet("p0", "r0")
    assert shares(run, scoring=10.0, scoring_capacity=2.0).scoring == 5.0
    # Functions that only wait are scored in any number.
    assert shares(run, scoring=10.0, scoring_capacity=0.0).scoring == 0.0


def test_the_pace_has_the_bound_the_reward_time_and_the_slots() -> None:
    run = Driven.fleet("p0", "r0", "r1")
    run.train("r0")
    leader = leader_of(run, slot_occupancy=0.4, transfer_s=2.0, lease_s=0.02)
    leader.flow.add(shares(run, slot_occupancy=0.4), 1.0, 1.0)
    leader.flow.commit(run.state.steps.metrics)
    pace = pace_of(leader)
    assert pace.max_staleness == 1 and pace.reward_s == pytest.approx(0.1)
    assert pace.shares.occupancy == pytest.approx(0.4)
    assert (pace.rollouts, pace.policies, pace.reward_processes) == (2, 1, 2)
    assert (pace.transfer_s, pace.lease_s, pace.append_s) == (2.0, 0.02, 0.01)


def test_steps_that_wait_by_turns_are_averaged() -> None:
    """Groups that come in waves of two steps: the newest step alone says that trainers never
    wait."""
    average = FlowAverage()
    for _ in range(20):
        average.commit({"step_s": 1.5, "time_wait_s": 1.3, "loss": 3.0})
        average.commit({"step_s": 0.2, "time_wait_s": 0.0})
    waited = average.of_a_step("time_wait_s") / average.of_a_step("step_s")
    assert 0.6 < waited < 0.9
    assert average.of_a_step("loss") == 0.0
