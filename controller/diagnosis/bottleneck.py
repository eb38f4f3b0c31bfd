"""Bottleneck of a run that makes progress, and the change that makes it faster. Pure.

                          trainers wait for groups?
                     no │                          │ yes
        commits slow? ──┤                          ├── engines lack the newest weights ──► weight transfer
       yes: controller  │                          ├── scorers full ─────────────────────► scorers
                        │                          ├── more groups to score than places ─► rewards
        no: trainers, if│                          ├── slots full ──────────────────────► generation
        groups are ready│                          ├── admission closed ────────────────► staleness bound
                        ▼                          └── neither ─────────────────────────► controller
                    balanced

By Little's law a run that the staleness bound limits makes (max_staleness + 1) x groups_per_step
groups in the time that one group takes, however many workers it has: more of these change nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from controller.fleet.flow_shares import FlowShares
from paceline.worker_pools import scorer_of

STARVED = 0.25
"""Trainers are starved from this share of a step spent waiting for groups."""
FULL = 0.7
"""Engines are full from this share of their slots."""
MOSTLY = 0.5
LAGGING = 0.3
SLOW_COMMITS = 0.4
"""A controller is slow from this share of a step spent committing, or waiting for an append."""
MOST_STALENESS = 64


class BottleneckKind(StrEnum):
    """What a run would be faster without."""

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
    wait_s: float
    """Of a step, waiting for groups; mean of the replicas."""
    compute_s: float = 0.0
    commit_s: float = 0.0
    """From the reduced gradients to the optimizer step."""
    generate_s: float = 0.0
    """Of one group, as the next one."""
    reward_s: float = 0.0
    transfer_s: float = 0.0
    """Of the weights to one engine."""
    append_s: float = 0.0
    """Of the journal."""
    lease_s: float = 0.0
    """A lease request that found tasks."""
    shares: FlowShares = field(default_factory=FlowShares)
    max_staleness: int = 4
    policies: int = 1
    rollouts: int = 1
    reward_processes: int = 1
    scorer: str = ""
    """Pool of the busiest scorer; empty: there is none."""
    scorers: int = 0
    """Its workers."""
    recorded: bool = False
    """Rollout workers tokenise rows of the data: no engine runs."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    kind: BottleneckKind
    sentence: str
    """Which role waits for which, and what would help."""


def bottleneck_of(pace: Pace) -> Bottleneck:
    starved = min(1.0, pace.wait_s / pace.step_s) if pace.step_s > 0 else 0.0
    kind = _kind(pace, starved)
    sentences = _SENTENCES | _OF_RECORDED if pace.recorded else _SENTENCES
    return Bottleneck(kind, sentences[kind](pace, f"{starved:.0%}"))


def _kind(pace: Pace, starved: float) -> BottleneckKind:
    s = pace.shares
    if starved < STARVED:
        if pace.step_s > 0 and _slow_appends(pace) and pace.commit_s / pace.step_s >= SLOW_COMMITS:
            return BottleneckKind.CONTROLLER
        held_back = s.closed >= MOSTLY or s.ready >= MOSTLY
        return BottleneckKind.TRAINERS if held_back else BottleneckKind.NONE
    if pace.recorded:
        return _kind_of_recorded(pace)
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


def _kind_of_recorded(pace: Pace) -> BottleneckKind:
    """Of starved trainers: rows need no weights, no slots and no rewards."""
    if _slow_appends(pace) or pace.shares.unsent >= 1.0:
        return BottleneckKind.CONTROLLER
    if pace.shares.closed >= MOSTLY or not pace.max_staleness:
        return BottleneckKind.STALENESS
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


def _trainers(pace: Pace, share: str) -> str:
    return (
        f"Rollout workers wait for the trainers, which compute {_s(pace.compute_s)} of a step of "
        f"{_s(pace.step_s)}: groups for the next steps are ready. Add policy replicas (now "
        f"{pace.policies}); more rollout workers would not help."
    )


def _generation(pace: Pace, share: str) -> str:
    return (
        f"Trainers are starved ({share} of a step spent waiting): {pace.shares.occupancy:.0%} of the "
        f"engines' slots are in use. Add rollout workers (now {pace.rollouts})."
    )


def _rewards(pace: Pace, share: str) -> str:
    return (
        f"Trainers are starved ({share} of a step spent waiting): the rewards take {_s(pace.reward_s)} a "
        f"group, and {pace.shares.scoring:.1f} times as many groups wait for them as can be scored at once. "
        f"Raise reward.processes (now {pace.reward_processes}) or make the rewards faster; more rollout "
        "workers help only because each brings reward processes of its own."
    )


def _scorers(pace: Pace, share: str) -> str:
    return (
        f"Trainers are starved ({share} of a step spent waiting): the workers of scorer {scorer_of(pace.scorer)} are "
        f"busy {pace.shares.scorers:.0%} of the time, and groups wait for their scores. Add workers: paceline scale "
        f"{pace.scorer}={pace.scorers + 1}; more rollout workers would not help."
    )


def _staleness(pace: Pace, share: str) -> str:
    if not pace.max_staleness:
        return (
            f"Trainers wait for samples during {share} of a step, as in synchronous training: "
            "train.max_staleness = 0 allows no generation ahead. Raise it to 1 or more."
        )
    way_s = pace.generate_s + pace.reward_s
    return (
        f"Trainers are starved ({share} of a step spent waiting), though {1 - pace.shares.occupancy:.0%} of "
        f"the engines' slots are free: as many groups are in flight as a staleness of {pace.max_staleness} "
        f"allows, and a group takes {_s(way_s)} ({_s(pace.reward_s)} of it in rewards). Raise "
        f"train.max_staleness to {staleness_for(pace, way_s)}, or shorten the rewards; more rollout workers "
        "would not help."
    )


def _controller(pace: Pace, share: str) -> str:
    waits = min(1.0, (pace.wait_s + pace.commit_s) / pace.step_s)
    return (
        f"The controller is slow: an append to the journal takes {_s(pace.append_s)}, a lease "
        f"{_s(pace.lease_s)}, and trainers wait {waits:.0%} of a step for groups and commits. Bring Redis "
        "nearer to the controllers, or give both faster disks and a core of their own; more workers would "
        "not help."
    )


def _weights(pace: Pace, share: str) -> str:
    way_s = pace.transfer_s + pace.generate_s + pace.reward_s
    return (
        f"Trainers are starved ({share} of a step spent waiting): engines wait for weights "
        f"{pace.shares.lagging:.0%} of the time, and a transfer takes {_s(pace.transfer_s)}. Raise "
        f"train.max_staleness (now {pace.max_staleness}) to {staleness_for(pace, way_s)}, or give the weights "
        "a faster network; more workers would not help."
    )


def _none(pace: Pace, share: str) -> str:
    return "Trainers and rollout workers keep pace."


def _tokenising(pace: Pace, share: str) -> str:
    return (
        f"Trainers are starved ({share} of a step spent waiting): rollout workers tokenise rows no faster. Add "
        f"rollout workers (now {pace.rollouts})."
    )


def _rows_ahead(pace: Pace, share: str) -> str:
    if not pace.max_staleness:
        return (
            f"Trainers wait for rows during {share} of a step: train.max_staleness = 0 allows no row to be prepared "
            "ahead. Raise it to 1 or more."
        )
    return (
        f"Trainers are starved ({share} of a step spent waiting): as many rows are prepared as a staleness of "
        f"{pace.max_staleness} allows. Raise train.max_staleness to {staleness_for(pace, pace.wait_s)}; more rollout "
        "workers would not help."
    )


_SENTENCES = {
    BottleneckKind.TRAINERS: _trainers,
    BottleneckKind.GENERATION: _generation,
    BottleneckKind.REWARDS: _rewards,
    BottleneckKind.SCORERS: _scorers,
    BottleneckKind.STALENESS: _staleness,
    BottleneckKind.CONTROLLER: _controller,
    BottleneckKind.WEIGHTS: _weights,
    BottleneckKind.NONE: _none,
}


_OF_RECORDED = {
    BottleneckKind.GENERATION: _tokenising,
    BottleneckKind.STALENESS: _rows_ahead,
}


def _s(value: float) -> str:
    return f"{value * 1e3:.0f} ms" if value < 1.0 else f"{value:.1f} s"
