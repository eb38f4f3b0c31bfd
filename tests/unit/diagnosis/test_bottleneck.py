"""The bottleneck of constructed measurements: each limit is told apart, with its remedy."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from controller.diagnosis.bottleneck import (
    BottleneckKind,
    Pace,
    bottleneck_of,
    pace_of,
    reports_of,
    shares_of,
)
from controller.fleet.flow_shares import FlowAverage, FlowShares
from controller.fleet_loops import Autoscaling
from paceline.config.sections.workers import FleetConfig
from paceline.v1 import worker_pb2
from tests.fixtures.ledgers import Driven

STARVED = Pace(step_s=2.0, wait_s=1.6, compute_s=0.3, generate_s=1.0, reward_s=0.1)
CASES: dict[BottleneckKind, tuple[Pace, str, str]] = {
    # Measurements; the remedy's words; words of a remedy that would not help.
    BottleneckKind.TRAINERS: (
        replace(STARVED, wait_s=0.1, compute_s=1.8, shares=FlowShares(closed=0.9, ready=0.9)),
        "Add policy replicas",
        "Add rollout workers",
    ),
    BottleneckKind.GENERATION: (
        replace(STARVED, shares=FlowShares(occupancy=0.97)),
        "Add rollout workers",
        "reward.processes",
    ),
    BottleneckKind.REWARDS: (
        replace(
            STARVED,
            reward_s=0.7,
            shares=FlowShares(occupancy=0.1, idle=0.9, closed=0.8, scoring=5.0),
        ),
        "reward.processes",
        "train.max_staleness",
    ),
    BottleneckKind.SCORERS: (
        # The groups that wait for a scorer also count as groups that wait for the reward functions.
        replace(
            STARVED,
            reward_s=0.7,
            scorer="scorer:helpful",
            scorers=1,
            shares=FlowShares(occupancy=0.1, idle=0.9, closed=0.8, scoring=5.0, scorers=0.95),
        ),
        "paceline scale scorer:helpful=2",
        "reward.processes",
    ),
    BottleneckKind.STALENESS: (
        # As a first user met it: rewards only wait, so that any number is scored at once.
        replace(
            STARVED,
            step_s=0.42,
            wait_s=0.37,
            generate_s=0.05,
            reward_s=0.7,
            max_staleness=1,
            shares=FlowShares(occupancy=0.05, idle=0.9, closed=1.0),
        ),
        "train.max_staleness to 16",
        "Add rollout workers",
    ),
    BottleneckKind.CONTROLLER: (
        replace(STARVED, append_s=0.3, lease_s=0.7, shares=FlowShares(occupancy=0.3, idle=0.6)),
        "Redis",
        "Add rollout workers",
    ),
    BottleneckKind.WEIGHTS: (
        replace(
            STARVED,
            transfer_s=3.0,
            max_staleness=1,
            shares=FlowShares(occupancy=0.2, idle=0.7, lagging=0.7),
        ),
        "train.max_staleness",
        "Add rollout workers",
    ),
}


RECORDED = replace(STARVED, generate_s=0.0, reward_s=0.0, recorded=True)
OF_RECORDED: dict[str, tuple[Pace, BottleneckKind, str]] = {
    "tokenising": (RECORDED, BottleneckKind.GENERATION, "Add rollout workers (now 1)"),
    "staleness": (
        replace(RECORDED, max_staleness=2, shares=FlowShares(closed=0.9)),
        BottleneckKind.STALENESS,
        "Raise train.max_staleness to 5",
    ),
    "nothing ahead": (
        replace(RECORDED, max_staleness=0),
        BottleneckKind.STALENESS,
        "as a staleness of 0 allows",
    ),
    "journal": (replace(RECORDED, append_s=0.3), BottleneckKind.CONTROLLER, "Redis"),
    "unsent": (
        replace(RECORDED, shares=FlowShares(unsent=2.0)),
        BottleneckKind.CONTROLLER,
        "Redis",
    ),
    "trainers": (
        replace(RECORDED, wait_s=0.1, shares=FlowShares(ready=0.9)),
        BottleneckKind.TRAINERS,
        "Add policy replicas",
    ),
    "balanced": (replace(RECORDED, wait_s=0.1), BottleneckKind.NONE, "keep pace"),
}


@pytest.mark.parametrize("name", OF_RECORDED)
def test_recorded_data_is_limited_by_nothing_that_it_does_not_have(name: str) -> None:
    """No engine runs, no weights are sent, nothing is rewarded."""
    pace, kind, remedy = OF_RECORDED[name]
    found = bottleneck_of(pace)
    assert found.kind is kind, found.sentence
    assert remedy in found.sentence
    for absent in ("engine", "slots", "sample", "reward", "generation"):
        assert absent not in found.sentence


@pytest.mark.parametrize("kind", CASES)
def test_each_limit_is_told_with_the_remedy_that_helps(kind: BottleneckKind) -> None:
    pace, remedy, futile = CASES[kind]
    found = bottleneck_of(pace)
    assert found.kind is kind, found.sentence
    assert remedy in found.sentence and futile not in found.sentence


def test_limits_that_look_like_another_are_told_apart() -> None:
    scored = CASES[BottleneckKind.SCORERS][0]
    sync = replace(STARVED, max_staleness=0, shares=FlowShares(occupancy=0.3, closed=0.9))
    assert "a staleness of 0 allows" in bottleneck_of(sync).sentence
    for pace, kind in (
        # Scorers with time to spare.
        (replace(scored, shares=replace(scored.shares, scorers=0.3)), BottleneckKind.REWARDS),
        (
            replace(scored, shares=replace(scored.shares, occupancy=0.95, scoring=0.0)),
            BottleneckKind.GENERATION,
        ),
        (sync, BottleneckKind.STALENESS),
        # Engines that are full whenever trainers wait for them are too few all the same.
        (
            replace(sync, shares=FlowShares(occupancy=0.75, closed=0.5)),
            BottleneckKind.GENERATION,
        ),
        # Commits wait for the journal.
        (
            Pace(step_s=1.0, wait_s=0.1, compute_s=0.1, commit_s=0.8, append_s=0.2),
            BottleneckKind.CONTROLLER,
        ),
    ):
        assert bottleneck_of(pace).kind is kind


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


def shares(run: Driven, **gauges: float) -> FlowShares:
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


def test_the_autoscaler_adds_no_workers_for_a_limit_that_they_do_not_lift() -> None:
    """Starved trainers alone once made it double the rollout workers, and nothing got faster."""

    def proposed(run: Driven, **gauges: float) -> Any:
        leader = leader_of(run, **gauges)
        fleet = FleetConfig(policy=1, rollout=1, autoscale_steps=1, autoscale_patience=1)
        leader.context.config.fleet = fleet
        leader.context.config.train.groups_per_step = run.state.run.groups_per_step
        leader.proposal = None
        autoscaling = Autoscaling(leader)
        metrics = {"step_s": 1.0, "time_wait_s": 0.9}
        for _ in range(8):
            run.state.steps.metrics.update(metrics)
            leader.flow.commit(metrics)
            autoscaling._sample(run.state)
            autoscaling._committed(run.state)
        return leader.proposal

    run = Driven.fleet("p0", "r0", steps=100)
    run.train("r0")
    run.observe("r0", loaded=1)
    # As many groups are leased as the bound allows, and most slots are free.
    run.lease("r0", 64)
    assert shares(run).closed == 1.0
    assert proposed(run, slot_occupancy=0.1, engine_idle_fraction=0.9) is None
    assert proposed(run, slot_occupancy=1.0, engine_idle_fraction=0.0).counts.rollout == 2
