"""Fleet loops of the leader: calls of the provider and of the autoscaler.

    desired counts ──► provisioning ──► provider ──► processes         (not with the local provider)
    committed steps ─► autoscaling ──► proposal ──► Scale, if fleet.autoscale

Both run as asyncio tasks for the term of a leader. The next leader can recompute their state. A
failure of either is logged and retried; it never ends the term.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from controller.diagnosis.bottleneck import (
    BottleneckKind,
    bottleneck_of,
    pace_of,
    reports_of,
    scorer_loads,
    shares_of,
)
from controller.fleet.autoscale_policy import (
    Autoscaler,
    Proposal,
    ScaleBounds,
    Waits,
    WorkerCounts,
)
from controller.leader import Leader
from controller.ledger import decisions as cmd
from controller.ledger.decisions.commands import CommandRefused
from controller.ledger.enums import Phase, Role
from controller.ledger.state.state import State
from controller.lending import Lending
from controller.replicated_controller import Controller
from controller.runtime import NotLeading
from controller.status import status_of
from controller.store.journal import Deposed
from controller.weight_sweep import sweep_weights
from paceline.config.sections.workers import FleetConfig
from paceline.process.structured_log import event
from paceline.providers.base import Provider, Trouble, leader_provider
from paceline.v1 import admin_pb2
from paceline.weights.weight_store import WeightStore

log = logging.getLogger(__name__)

SAMPLE_S = 0.1
SCORERS = BottleneckKind.SCORERS
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
        )
        self._limited = fleet.scorers_max is not None
        self._lending = Lending(leader, steps=fleet.autoscale_steps)
        self._step = -1
        self._samples: list[tuple[float, bool]] = []
        """Since the last step: idle fraction of engines, and if no task was fresh enough."""

    async def run(self) -> None:
        state = self._leader.ledger.state
        self._step = state.versions.step
        while True:
            await asyncio.sleep(SAMPLE_S)
            if state.paused or state.phase is not Phase.OPEN:
                self._samples.clear()
                self._lending.paused()
                continue
            self.sample(state)
            if state.versions.step == self._step:
                continue
            self._step = state.versions.step
            waits = self.waits(state)
            if state.fleet.seats.training:
                await self._lending.committed(state, waits)
            # Workers that take turns wait for one another whatever their numbers.
            elif not state.fleet.seats.by_name:
                self.committed(state, waits)
                await self.carry_out(state)

    def sample(self, state: State) -> None:
        reports = reports_of(self._leader, state)
        step_s = state.steps.metrics.get("step_s", 0.0)
        roles = Role.POLICY, Role.SCORER
        others = [each for role in roles for each in reports_of(self._leader, state, role)]
        shares = shares_of(state, reports, scorer_loads(self._leader, state), others)
        self._leader.flow.add(shares, SAMPLE_S, step_s)
        self._lending.sample(state)
        if any("engine_idle_fraction" in report.gauges for _, report in reports):
            self._samples.append((shares.idle, shares.closed > 0))

    def waits(self, state: State) -> Waits:
        """How long each side waited in the step that was committed."""
        metrics = state.steps.metrics
        starved = metrics.get("time_wait_s", 0.0) / max(metrics.get("step_s", 0.0), 1e-6)
        throttled = 0.0
        if self._samples:
            # Engines also idle while they wait for weights: only time without tasks counts.
            idle, closed = (sum(column) for column in zip(*self._samples, strict=True))
            throttled = min(idle, closed) / len(self._samples)
        self._samples.clear()
        return Waits(min(1.0, starved), throttled)

    def committed(self, state: State, waits: Waits) -> None:
        starved, throttled = waits.starved, waits.throttled
        pace = pace_of(self._leader)
        kind = bottleneck_of(pace).kind
        scorer = _scorer_at_work(state, pace.scorer) if kind is SCORERS else None
        # Synchronous training is closed by design: its waits compare the roles alone.
        if scorer is None and kind not in GROWS and (pace.max_staleness or kind is SCORERS):
            # The groups in flight, the rewards, the weights or the controller are the limit.
            starved = throttled = 0.0
        counts = WorkerCounts(state.desired.get("policy", 1), state.desired.get("rollout", 1))
        waits = Waits(starved, throttled, scorer)
        self._autoscaler.observe(counts, waits, settled=settled(state, counts))
        found = self._autoscaler.proposal
        before, self._leader.proposal = self._leader.proposal, found
        if found is not None and (before is None or before.desired != found.desired):
            desired = " ".join(f"{pool}={n}" for pool, n in found.desired.items())
            event(log, "proposal", desired=desired, why=found.why, applied=self._applies(found))

    def _applies(self, found: Proposal) -> bool:
        """Scorers need a limit too."""
        return self._apply and (self._limited or not found.scorers)

    async def carry_out(self, state: State) -> None:
        found = self._leader.proposal
        if found is None or not self._applies(found):
            return
        counts = "-".join(f"{pool}{n}" for pool, n in found.desired.items())
        # A retry, by any leader, has the same request id.
        request = f"autoscale-step{self._step}-{counts}"
        try:
            await self._leader.execute(cmd.scale(request, found.desired))
        except (CommandRefused, NotLeading, Deposed) as error:
            event(log, "proposal not applied", why=str(error), level=logging.WARNING)


def _scorer_at_work(state: State, pool: str) -> tuple[str, int] | None:
    """Pool and workers; None while other workers than the desired ones answer for the scorer."""
    desired = state.desired.get(pool, 0)
    ready = sum(worker.pool == pool for worker in state.fleet.scorers())
    return (pool, desired) if desired and ready == desired else None


def limits_of(fleet: FleetConfig, groups_per_step: int) -> ScaleBounds:
    """The fleet's limits. More replicas than groups of a step would have no work."""
    most = groups_per_step if fleet.policy_max is None else fleet.policy_max
    roles = (fleet.policy_min, most), (fleet.rollout_min, fleet.rollout_max)
    return ScaleBounds(*roles, fleet.scorers_max)


def settled(state: State, counts: WorkerCounts) -> bool:
    """True if exactly the desired workers are active and neither evaluations nor the run's end slow
    them."""
    at_work = WorkerCounts(
        sum(w.joinable for w in state.fleet.living(Role.POLICY)),
        sum(w.joinable and not w.spare for w in state.fleet.living(Role.ROLLOUT)),
    )
    ahead = state.versions.step + state.run.max_staleness + 1
    return at_work == counts and not state.evals.rounds and ahead < state.run.steps


POLL_S = 0.5
"""Interval at which desired and living workers are compared with those of the last call."""
TROUBLED_S = 3.0
TURN_LIMIT_S = 120.0


def keep_fleet(controller: Controller, leader: Leader) -> None:
    """Starts the loops as chores of the leader, which end with its term."""
    leader.housekeeping.chore(_kept("autoscaling", Autoscaling(leader).run))

    async def drain(worker: admin_pb2.WorkerStatus) -> None:
        # One request id per process: every call and every leader may repeat it.
        request = f"surplus-{worker.worker_id}-{worker.incarnation}"
        await leader.execute(cmd.drain(request, worker.worker_id, replace=True))

    if (url := controller.config.weights.url) is not None:
        store = WeightStore(url, controller.config.run.name)
        leader.housekeeping.chore(_kept("sweep", lambda: sweep_weights(leader, store)))
    provider = leader_provider(controller.config, str(controller.run_dir.resolve()), drain)
    if provider is not None:
        provisioning = Provisioning(controller, leader, provider)
        leader.housekeeping.chore(_kept("provisioning", provisioning.run))


async def _kept(name: str, run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    while True:
        try:
            await run()
        except Exception:
            log.exception("%s failed, retrying", name)
        await asyncio.sleep(TROUBLED_S)


@dataclass(slots=True)
class Provisioning:
    """Calls the provider repeatedly, each time with a new status."""

    controller: Controller
    leader: Leader
    provider: Provider

    async def run(self) -> None:
        try:
            while True:
                seen = self._signature()
                await self._turn()
                await self._until_due(seen)
        finally:
            await self.provider.close()

    async def _turn(self) -> None:
        if not self.leader.active:
            return
        try:
            async with asyncio.timeout(TURN_LIMIT_S):
                trouble = await self.provider.converge(status_of(self.controller))
        except (NotLeading, Deposed):
            return
        except Trouble as why:
            trouble = str(why)
        except CommandRefused as refusal:
            trouble = f"a worker could not be drained: {refusal}"
        except TimeoutError:
            trouble = f"the provider did not answer for {TURN_LIMIT_S:g} s"
        if trouble != self.leader.provider_trouble:
            self.leader.provider_trouble = trouble
            event(log, "provider", name=self.provider.name, status=trouble or "complete")

    async def _until_due(self, seen: object) -> None:
        """Waits until the provider's input has changed or its next call is due."""
        loop = asyncio.get_running_loop()
        quiet_s = TROUBLED_S if self.leader.provider_trouble else self.provider.quiet_s
        due = loop.time() + quiet_s
        while loop.time() < due:
            await asyncio.sleep(POLL_S)
            if self._signature() != seen:
                return

    def _signature(self) -> object:
        status = status_of(self.controller)
        workers = sorted((w.worker_id, w.incarnation, w.state) for w in status.workers)
        return status.phase, dict(status.desired), workers
