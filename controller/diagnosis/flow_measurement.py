"""Measurement of the flow of groups: the leader's ledger and reports as a ``Pace``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from controller.diagnosis.bottleneck import Pace
from controller.fleet.flow_shares import FlowShares
from controller.leader import Leader
from controller.ledger.decisions.leases import admissible
from controller.ledger.enums import Role
from controller.ledger.state.fleet import Worker
from controller.ledger.state.state import State
from paceline.v1 import worker_pb2

Reports = Sequence[tuple[Worker, worker_pb2.Report]]


def reports_of(leader: Leader, state: State) -> Reports:
    """Living rollout workers that do not stand by, with their newest reports."""
    found = []
    for worker in state.fleet.living(Role.ROLLOUT):
        session = leader.sessions.of(worker.worker_id, worker.incarnation)
        if session is not None and not worker.spare:
            found.append((worker, session.report))
    return found


def scorer_loads(leader: Leader, state: State) -> dict[str, float]:
    """By pool: share of its workers, 0 to 1, that have as many requests as they can work on. A
    model computes one batch after the other, so any request is enough. A judge behind a URL has
    batch_size requests open at once."""
    loads: dict[str, list[float]] = {}
    for worker in state.fleet.scorers():
        session = leader.sessions.of(worker.worker_id, worker.incarnation)
        if session is None:
            continue
        config = leader.context.config.scorers.by_name[worker.scorer]
        at_once = config.batch_size if config.url is not None else 1
        queued = session.report.gauges.get("queued", 0.0)
        loads.setdefault(worker.pool, []).append(min(1.0, queued / at_once))
    return {pool: _mean(of) for pool, of in loads.items()}


def shares_of(
    state: State, reports: Reports, scorers: Mapping[str, float] | None = None
) -> FlowShares:
    """The shares of this moment. ``scorers``: their loads by pool."""
    gauges = [report.gauges for _, report in reports]
    open_for_newest = admissible(state, state.versions.version) > 0
    recorded = state.run_spec is not None and state.run_spec.recorded  # its workers load no weights
    behind = [
        open_for_newest and not recorded and admissible(state, worker.loaded_version) <= 0
        for worker, _ in reports
    ]
    capacity = sum(g["scoring_capacity"] for g in gauges if "scoring_capacity" in g)
    scoring = sum(g["scoring"] for g in gauges if g.get("scoring_capacity"))
    group = max(1, state.run.groups_per_step)
    return FlowShares(
        occupancy=_mean([g["slot_occupancy"] for g in gauges if "slot_occupancy" in g]),
        idle=_mean([g["engine_idle_fraction"] for g in gauges if "engine_idle_fraction" in g]),
        closed=float(not open_for_newest),
        lagging=_mean([float(value) for value in behind]),
        scoring=scoring / capacity if capacity else 0.0,
        scorers=max((scorers or {}).values(), default=0.0),
        unsent=sum(g["unsent"] for g in gauges if "unsent" in g) / group,
        ready=float(len(state.tasks.ready) >= group),
    )


def pace_of(leader: Leader) -> Pace:
    state, config = leader.ledger.state, leader.context.config
    reports, seconds = reports_of(leader, state), leader.flow.of_a_step
    gauges = [report.gauges for _, report in reports]
    loads = scorer_loads(leader, state)
    busiest = max(loads, key=lambda pool: (loads[pool], pool), default="")

    return Pace(
        step_s=seconds("step_s"),
        wait_s=seconds("time_wait_s"),
        compute_s=seconds("time_compute_s"),
        commit_s=seconds("time_commit_s"),
        generate_s=seconds("time_generate_s"),
        reward_s=seconds("time_reward_s"),
        transfer_s=_mean([g["transfer_s"] for g in gauges if "transfer_s" in g]),
        append_s=leader.group_commit.append_s,
        lease_s=_mean([g["lease_s"] for g in gauges if "lease_s" in g]),
        shares=leader.flow.mean,
        max_staleness=state.run.max_staleness,
        policies=len(state.fleet.living(Role.POLICY)),
        rollouts=len(reports),
        reward_processes=config.reward.processes,
        recorded=state.run_spec is not None and state.run_spec.recorded,
        scorer=busiest,
        scorers=len(state.fleet.living_in(busiest)),
    )


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else 0.0
