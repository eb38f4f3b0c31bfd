"""Autoscaler loop: measures waiting times, proposes worker counts and, if enabled, applies them.

The metrics of each step contain the replicas' waiting time. A rollout engine is throttled while it is
idle and the ledger has no task that its weights are fresh enough for; both are sampled.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict

from controller.diagnosis.bottleneck import BottleneckKind, bottleneck_of
from controller.errors import NotLeading
from controller.fleet.autoscale_policy import Autoscaler, ScaleBounds, Waits, WorkerCounts
from controller.fleet.flow_measurement import pace_of, reports_of, shares_of
from controller.leader import Leader
from controller.ledger.commands import CommandRefused, Role, Scale
from controller.ledger.enums import Phase
from controller.ledger.state.state import State
from controller.store.journal import Deposed
from paceline.config.workers import FleetConfig
from paceline.process.structured_log import event

log = logging.getLogger(__name__)

SAMPLE_S = 0.1
GROWS = (BottleneckKind.GENERATION, BottleneckKind.TRAINERS, BottleneckKind.NONE)
"""Bottlenecks that another number of workers may lift."""


class Autoscaling:
    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        fleet = leader.context.config.fleet
        self._apply = fleet.autoscale
        self._autoscaler = Autoscaler(
            limits_of(fleet, leader.context.config.train.groups_per_step),
            steps=fleet.autoscale_steps,
            high=fleet.autoscale_high,
            patience=fleet.autoscale_patience,
        )
        self._step = -1
        self._samples: list[tuple[float, bool]] = []
        """Since the last step: idle fraction of the engines, and whether no task was fresh enough."""

    async def run(self) -> None:
        state = self._leader.ledger.state
        self._step = state.versions.step
        while True:
            await asyncio.sleep(SAMPLE_S)
            if state.paused or state.phase is not Phase.OPEN:
                self._samples.clear()
                continue
            self._sample(state)
            if state.versions.step != self._step:
                self._step = state.versions.step
                self._committed(state)
                await self._carry_out(state)

    def _sample(self, state: State) -> None:
        reports = reports_of(self._leader, state)
        step_s = state.steps.metrics.get("step_s", 0.0)
        shares = shares_of(state, reports)
        self._leader.flow.add(shares, SAMPLE_S, step_s)
        if any("engine_idle_fraction" in report.gauges for _, report in reports):
            self._samples.append((shares.idle, shares.closed > 0))

    def _committed(self, state: State) -> None:
        metrics = state.steps.metrics
        starved = metrics.get("time_wait_s", 0.0) / max(metrics.get("step_s", 0.0), 1e-6)
        throttled = 0.0
        if self._samples:
            # Engines also idle while they wait for weights: only time without tasks counts.
            idle, closed = (sum(column) for column in zip(*self._samples, strict=True))
            throttled = min(idle, closed) / len(self._samples)
        self._samples.clear()
        pace = pace_of(self._leader)
        # Synchronous training is closed by design: its waits compare the roles alone.
        if pace.max_staleness and bottleneck_of(pace).kind not in GROWS:
            # The groups in flight, the rewards, the weights or the controller are the limit.
            starved = throttled = 0.0
        counts = WorkerCounts(state.desired.get("policy", 1), state.desired.get("rollout", 1))
        self._autoscaler.observe(
            counts, Waits(min(1.0, starved), throttled), settled=settled(state, counts)
        )
        found = self._autoscaler.proposal
        before, self._leader.proposal = self._leader.proposal, found
        if found is not None and (before is None or before.counts != found.counts):
            desired = f"policy={found.counts.policy} rollout={found.counts.rollout}"
            event(log, "proposal", desired=desired, why=found.why, applied=self._apply)

    async def _carry_out(self, state: State) -> None:
        found = self._leader.proposal
        if found is None or not self._apply:
            return
        counts = found.counts
        # A retry, by any leader, has the same request id.
        request = f"autoscale-step{self._step}-policy{counts.policy}-rollout{counts.rollout}"
        try:
            await self._leader.execute(Scale(request, asdict(counts)))
        except (CommandRefused, NotLeading, Deposed) as error:
            event(log, "proposal not applied", why=str(error), level=logging.WARNING)


def limits_of(fleet: FleetConfig, groups_per_step: int) -> ScaleBounds:
    """The fleet's limits. More replicas than groups of a step would have no work."""
    most = groups_per_step if fleet.policy_max is None else fleet.policy_max
    return ScaleBounds((fleet.policy_min, most), (fleet.rollout_min, fleet.rollout_max))


def settled(state: State, counts: WorkerCounts) -> bool:
    """Whether exactly the desired workers are active and neither evaluations nor the run's end slow them."""
    at_work = WorkerCounts(
        sum(w.joinable for w in state.fleet.living(Role.POLICY)),
        sum(w.joinable and not w.spare for w in state.fleet.living(Role.ROLLOUT)),
    )
    ahead = state.versions.step + state.run.max_staleness + 1
    return at_work == counts and not state.evals.rounds and ahead < state.run.steps
