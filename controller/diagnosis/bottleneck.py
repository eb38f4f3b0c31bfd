"""Bottleneck of a run that makes progress, and the change that makes it faster: a pure function of
what the leader's ledger and reports say of the flow of groups.

                          trainers wait for groups?
                     no │                          │ yes
        commits slow? ──┤                          ├── engines lack the newest weights ──► weights
       yes: controller  │                          ├── scorers full ─────────────────────► scorers
                        │                          ├── more groups to score than places ─► rewards
        no: trainers, if│                          ├── slots full ──────────────────────► generation
        groups are ready│                          ├── admission closed ────────────────► staleness
                        ▼                          └── neither ─────────────────────────► controller
                    balanced

By Little's law a run that the staleness bound limits makes (max_staleness + 1) x groups_per_step
groups in the time that one group takes, however many workers it has: more of these change nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from controller.fleet.flow_fractions import FlowFractions, mean_of
from controller.leader import Leader
from controller.ledger.decisions.leases import admissible
from controller.ledger.enums import Role
from controller.ledger.state.fleet import Worker
from controller.ledger.state.state import State
from paceline.v1 import worker_pb2
from paceline.worker_pools import scorer_of

Reports = Sequence[tuple[Worker, worker_pb2.Report]]

STARVED = 0.25  # trainers are starved from this share of a step spent waiting for groups
FULL = 0.7  # engines are full from this share of their slots
MOSTLY = 0.5
LAGGING = 0.3
SLOW_COMMITS = 0.4
"""A controller is slow from this share of a step spent committing, or waiting for an append."""
MOST_STALENESS = 64


class BottleneckKind(StrEnum):
    TRAINERS = "trainers"
    GENERATION = "generation"
    REWARDS = "rewards"
    SCORERS = "scorers"  # workers of one scorer
    STALENESS = "staleness"  # max_staleness bounds the groups in flight
    CONTROLLER = "controller"  # or its Redis
    WEIGHTS = "weights"  # transfer of weights to the engines
    NONE = "none"  # trainers and rollout workers keep pace


@dataclass(frozen=True, slots=True)
class Pace:
    """Measurements of the last steps. Times in seconds; 0: not measured."""

    step_s: float
    wait_s: float  # part of a step spent waiting for groups; mean of the replicas
    compute_s: float = 0.0
    commit_s: float = 0.0  # from the reduced gradients to the optimizer step
    generate_s: float = 0.0  # time of one group, as the next one
    reward_s: float = 0.0
    transfer_s: float = 0.0
    append_s: float = 0.0
    lease_s: float = 0.0  # a lease request that found tasks
    shares: FlowFractions = field(default_factory=FlowFractions)
    max_staleness: int = 4
    policies: int = 1
    rollouts: int = 1
    reward_processes: int = 1
    scorer: str = ""  # pool of the busiest scorer; empty: there is none
    scorers: int = 0
    recorded: bool = False  # rollout workers tokenise rows of the data: no engine runs


@dataclass(frozen=True, slots=True)
class Bottleneck:
    kind: BottleneckKind
    sentence: str


_STARVED = "Trainers are starved ({share:.0%} of a step spent waiting)"
_SENTENCES = {
    BottleneckKind.TRAINERS: (
        "Rollout workers wait for the trainers, which compute {compute_s} of a step of {step_s}: "
        "groups for the next steps are ready. Add policy replicas (now {p.policies}); more rollout "
        "workers would not help."
    ),
    BottleneckKind.GENERATION: (
        f"{_STARVED}, and rollout workers are at work. Add rollout workers (now {{p.rollouts}})."
    ),
    BottleneckKind.REWARDS: (
        f"{_STARVED}: the rewards take {{reward_s}} a group, and {{s.scoring:.1f}} times as many "
        "groups wait for them as can be scored at once. Raise reward.processes (now "
        "{p.reward_processes}) or make the rewards faster; more rollout workers help only because "
        "each brings reward processes of its own."
    ),
    BottleneckKind.SCORERS: (
        f"{_STARVED}: the workers of scorer {{scorer}} are busy {{s.scorers:.0%}} of the time, and "
        "groups wait for their scores. Add workers: paceline scale {p.scorer}={more_scorers}; more "
        "rollout workers would not help."
    ),
    BottleneckKind.STALENESS: (
        f"{_STARVED}: as many groups are in flight as a staleness of {{p.max_staleness}} allows, "
        "and a group takes {way_s}{of_it}. Raise train.max_staleness to {for_way}; more rollout "
        "workers would not help."
    ),
    BottleneckKind.CONTROLLER: (
        "The controller is slow: an append to the journal takes {append_s}, a lease {lease_s}, and "
        "trainers wait {waits:.0%} of a step for groups and commits. Bring Redis nearer to the "
        "controllers, or give both faster disks and a core of their own; more workers would not "
        "help."
    ),
    BottleneckKind.WEIGHTS: (
        f"{_STARVED}: engines wait for weights {{s.lagging:.0%}} of the time, and a transfer takes "
        "{transfer_s}. Raise train.max_staleness (now {p.max_staleness}) to {for_transfer}, or "
        "give the weights a faster network; more workers would not help."
    ),
    BottleneckKind.NONE: "Trainers and rollout workers keep pace.",
}


def bottleneck_of(pace: Pace) -> Bottleneck:
    starved = min(1.0, pace.wait_s / pace.step_s) if pace.step_s > 0 else 0.0
    kind = _kind(pace, starved)
    # Rows of recorded data are neither generated nor rewarded.
    way_s = pace.wait_s if pace.recorded else pace.generate_s + pace.reward_s
    times = {f.name: getattr(pace, f.name) for f in fields(pace) if f.name.endswith("_s")}
    words: dict[str, Any] = {name: _s(value) for name, value in {**times, "way_s": way_s}.items()}
    words |= {
        "share": starved,
        "of_it": f" ({_s(pace.reward_s)} of it in rewards)" if pace.reward_s else "",
        "scorer": scorer_of(pace.scorer) if pace.scorer else "",
        "more_scorers": pace.scorers + 1,
        "waits": min(1.0, (pace.wait_s + pace.commit_s) / (pace.step_s or math.inf)),
        "for_way": staleness_for(pace, way_s),
        "for_transfer": staleness_for(pace, way_s + pace.transfer_s),
    }
    return Bottleneck(kind, _SENTENCES[kind].format(p=pace, s=pace.shares, **words))


def _kind(pace: Pace, starved: float) -> BottleneckKind:
    s = pace.shares
    if starved < STARVED:
        if pace.step_s > 0 and _slow_appends(pace) and pace.commit_s / pace.step_s >= SLOW_COMMITS:
            return BottleneckKind.CONTROLLER
        held_back = s.closed >= MOSTLY or s.ready >= MOSTLY
        return BottleneckKind.TRAINERS if held_back else BottleneckKind.NONE
    if pace.recorded:  # rows need no weights, no slots and no rewards
        if _slow_appends(pace) or s.unsent >= 1.0:
            return BottleneckKind.CONTROLLER
        bound = s.closed >= MOSTLY or not pace.max_staleness
        return BottleneckKind.STALENESS if bound else BottleneckKind.GENERATION
    if s.lagging >= LAGGING:
        return BottleneckKind.WEIGHTS
    if pace.scorer and s.scorers >= FULL and s.occupancy < FULL:
        return BottleneckKind.SCORERS
    if s.scoring >= 1.0 and s.occupancy < FULL:
        return BottleneckKind.REWARDS
    if _slow_appends(pace):
        return BottleneckKind.CONTROLLER
    # Synchronous engines can only be full while the trainers wait.
    while_open = 1.0 if pace.max_staleness else starved
    if s.occupancy >= FULL * while_open:
        return BottleneckKind.GENERATION
    if s.closed >= MOSTLY or not pace.max_staleness:
        return BottleneckKind.STALENESS
    # Tasks are there and slots are free: they do not reach the engines.
    if s.idle >= MOSTLY or s.unsent >= 1.0:
        return BottleneckKind.CONTROLLER
    return BottleneckKind.GENERATION


def _slow_appends(pace: Pace) -> bool:
    """Each group and each commit waits for the journal at least twice: lease and verdict, vote and
    plan."""
    return pace.step_s > 0 and 4 * pace.append_s / pace.step_s >= SLOW_COMMITS


def staleness_for(pace: Pace, latency_s: float) -> int:
    """``max_staleness`` at which so long a way of a group no longer keeps the trainers waiting."""
    busy_s = max(pace.step_s - pace.wait_s, 0.05 * pace.step_s, 1e-3)
    # One step's groups are being trained meanwhile.
    wanted = math.ceil(latency_s / busy_s - 1e-6) + 1
    return min(max(pace.max_staleness + 1, wanted), MOST_STALENESS)


def _s(value: float) -> str:
    return f"{value * 1e3:.0f} ms" if value < 1.0 else f"{value:.1f} s"


def reports_of(leader: Leader, state: State, role: Role = Role.ROLLOUT) -> Reports:
    """Living workers of the role that do not stand by, with their newest reports."""
    found = []
    for worker in state.fleet.living(role):
        session = leader.sessions.of(worker.worker_id, worker.incarnation)
        if session is not None and not worker.spare and state.fleet.occupies(worker):
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
    return {pool: mean_of(of) for pool, of in loads.items()}


def shares_of(
    state: State,
    reports: Reports,
    scorers: Mapping[str, float] | None = None,
    others: Reports = (),
) -> FlowFractions:
    """The shares of this moment. ``reports``: of rollout workers, ``others``: of other workers with
    devices. ``scorers``: their loads by pool."""
    gauges = [report.gauges for _, report in reports]
    every = [*gauges, *(report.gauges for _, report in others)]
    open_for_newest = admissible(state, state.versions.version) > 0
    recorded = state.run_spec is not None and state.run_spec.recorded  # its workers load no weights
    behind = [
        open_for_newest and not recorded and admissible(state, worker.loaded_version) <= 0
        for worker, _ in reports
    ]
    idle = [g["engine_idle_fraction"] for g in gauges if "engine_idle_fraction" in g]
    capacity = sum(g["scoring_capacity"] for g in gauges if "scoring_capacity" in g)
    scoring = sum(g["scoring"] for g in gauges if g.get("scoring_capacity"))
    group = max(1, state.run.groups_per_step)
    return FlowFractions(
        occupancy=mean_of([g["slot_occupancy"] for g in gauges if "slot_occupancy" in g]),
        idle=mean_of(idle),
        closed=float(not open_for_newest),
        lagging=mean_of([float(value) for value in behind]),
        scoring=scoring / capacity if capacity else 0.0,
        scorers=max((scorers or {}).values(), default=0.0),
        unsent=sum(g["unsent"] for g in gauges if "unsent" in g) / group,
        ready=float(len(state.tasks.ready) >= group),
        generating=mean_of([1.0 - share for share in idle]),
        generated=mean_of([g["tokens_per_s"] for g in gauges if "tokens_per_s" in g]),
        devices=mean_of([g["gpu_utilization"] for g in every if "gpu_utilization" in g]),
    )


def utilisation_of(leader: Leader) -> dict[str, float]:
    """Returns what reports tell of the metrics ``OBSERVED``, averaged over the last steps."""
    state, flow = leader.ledger.state, leader.flow
    found = {}
    if flow.weight and not state.run.recorded:
        ranks = leader.context.config.rollout.tensor_parallel
        found["engine_busy"] = flow.mean.generating
        found["engine_tokens_per_s_device"] = flow.mean.generated / ranks
    if flow.mean.devices:
        found["device_busy"] = flow.mean.devices
    return found


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
        transfer_s=mean_of([g["transfer_s"] for g in gauges if "transfer_s" in g]),
        append_s=leader.group_commit.append_s,
        lease_s=mean_of([g["lease_s"] for g in gauges if "lease_s" in g]),
        shares=leader.flow.mean,
        max_staleness=state.run.max_staleness,
        policies=len(state.fleet.living(Role.POLICY)),
        rollouts=len(reports),
        reward_processes=config.reward.processes,
        recorded=state.run_spec is not None and state.run_spec.recorded,
        scorer=busiest,
        scorers=len(state.fleet.living_in(busiest)),
    )
