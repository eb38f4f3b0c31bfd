"""Scorers that hold the trainers up: their load is measured, and the autoscaler proposes more of
them, within the limit."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from controller.diagnosis.bottleneck import pace_of, scorer_loads
from controller.fleet.autoscale_policy import Autoscaler, ScaleBounds, Waits, WorkerCounts, propose
from controller.fleet.flow_shares import FlowAverage
from controller.fleet_loops import Autoscaling
from controller.ledger import decisions as cmd
from paceline.v1 import worker_pb2
from tests.fixtures.configs import config_of
from tests.fixtures.ledgers import Driven

POOL = "scorer:helpful"
FLEET = WorkerCounts(1, 1)
LIMITS = ScaleBounds((1, 4), (1, 4))
MODEL = {"kind": "reward_model", "path": "/rm"}
JUDGE = {"kind": "judge", "url": "http://judge/v1", "model": "j", "batch_size": 8}


def waits(workers: int = 1, starved: float = 0.8, pool: str = POOL) -> Waits:
    return Waits(starved, 0.0, (pool, workers))


def test_a_proposal_needs_as_many_steps_in_a_row_as_it_is_patient() -> None:
    growth = Autoscaler(LIMITS, steps=3)
    found = []
    none = Waits(0.0, 0.0)
    for one in (
        none,
        waits(),
        waits(),
        none,
        waits(),
        waits(pool="scorer:short"),
        waits(),
        waits(),
    ):
        growth.observe(FLEET, one, settled=True)
        found.append(growth.proposal)
    assert found == [None] * 8
    for _ in range(4):  # the end of one measurement, and another that agrees
        assert growth.proposal is None
        growth.observe(FLEET, waits(), settled=True)
    assert growth.proposal is not None and growth.proposal.scorers == {POOL: 2}
    for _ in range(3):
        growth.observe(FLEET, waits(starved=0.1), settled=True)
    assert growth.proposal is None


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


def leader_of(run: Driven, scorer: dict[str, Any], queued: float, **fleet: Any) -> Any:
    """Its engines have free slots, and each scorer reports ``queued`` completions."""
    config = config_of(
        scorers={"helpful": scorer},
        fleet={"policy": 1, "rollout": 1, "autoscale_steps": 2, **fleet},
    )
    gauges = {"slot_occupancy": 0.1, "engine_idle_fraction": 0.9, "queued": queued}
    report = worker_pb2.Report(gauges=gauges)
    commands: list[cmd.Command[str]] = []

    async def execute(command: cmd.Command[str]) -> None:
        commands.append(command)

    return SimpleNamespace(
        ledger=run.ledger,
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
        autoscaling._sample(leader.ledger.state)
        autoscaling._committed(leader.ledger.state)
    return autoscaling


def test_a_model_is_loaded_by_any_request_and_a_judges_url_by_a_batch() -> None:
    run = at_work(2)
    assert scorer_loads(leader_of(run, MODEL, 1.0), run.state) == {POOL: 1.0}
    assert scorer_loads(leader_of(run, MODEL, 0.0), run.state) == {POOL: 0.0}
    assert scorer_loads(leader_of(run, JUDGE, 2.0), run.state) == {POOL: 0.25}
    pace = pace_of(leader_of(run, MODEL, 1.0))
    assert (pace.scorer, pace.scorers) == (POOL, 2)


def test_trainers_that_wait_for_scores_get_more_scorers_and_no_rollout_workers() -> None:
    leader = leader_of(at_work(), MODEL, queued=4.0)
    measured(leader)
    assert leader.proposal.desired == {"policy": 1, "rollout": 1, POOL: 2}
    assert POOL in leader.proposal.why


def test_scorers_that_idle_are_not_grown() -> None:
    leader = leader_of(at_work(), MODEL, queued=0.0)
    measured(leader)
    assert leader.proposal is None or leader.proposal.scorers == {}


def test_a_scorer_that_is_missing_is_awaited_first() -> None:
    run = at_work()
    run.state.desired[POOL] = 2
    leader = leader_of(run, MODEL, queued=4.0)
    measured(leader)
    assert leader.proposal is None


@pytest.mark.parametrize("most", [None, 4])
async def test_a_proposal_of_scorers_is_applied_only_within_a_limit(most: int | None) -> None:
    limits = {"autoscale": True, "policy_max": 2, "rollout_max": 2, "scorers_max": most}
    leader = leader_of(at_work(), MODEL, queued=4.0, **limits)
    autoscaling = measured(leader)
    await autoscaling._carry_out(leader.ledger.state)
    applied = [dict(command.args[1]) for command in leader.commands]
    assert applied == ([] if most is None else [{"policy": 1, "rollout": 1, POOL: 2}])
