"""Workers of emulated durations: slots, generation, rewards, weight transfers and training take
time.

Real sessions and requests as in ``fake_workers``; what would compute only sleeps, so that a limit
of a run (trainers, engines, rewards, staleness, the controller, weights) can be set and lifted.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline.config.schema import Config
from paceline.rpc.client import RequestRefused
from paceline.v1 import common_pb2, policy_pb2, rollout_pb2, worker_pb2
from testbed.workers.fake_workers import FakePolicy, FakeRollout

WAIT_S = 0.2
"""How long a lease request is held: what engines load meanwhile counts with the next one."""


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds, and the places of one rollout worker."""

    generate_s: float = 0.05
    """Of a group in a slot."""
    slots: int = 8
    """Groups that the engine generates at once."""
    reward_s: float = 0.01
    """Of a group."""
    reward_processes: int = 0
    """Groups that are scored at once; 0: any number, because the reward only waits."""
    transfer_s: float = 0.02
    """Of a version of the weights."""
    compute_s: float = 0.02
    """Of a replica for one group."""


class EmulatedRollout(FakeRollout):
    """Leases as many groups as its engine has slots for."""

    def __init__(
        self, config: Config, addresses: list[str], worker_id: str, durations: Durations
    ) -> None:
        super().__init__(config, addresses, worker_id)
        self.durations = durations
        self._slots = asyncio.Semaphore(durations.slots)
        self._scorers = asyncio.Semaphore(durations.reward_processes or 1 << 20)
        self._loaded = -1
        self._generating = self._scoring = self._unsent = 0
        self._room = asyncio.Event()
        self._groups: set[asyncio.Task[None]] = set()

    @property
    def version(self) -> int:
        return self._loaded

    def report(self) -> worker_pb2.Report:
        report = super().report()
        d, leases = self.durations, self.timings.lease[-16:]
        gauges = {
            "slot_occupancy": self._generating / d.slots,
            "engine_idle_fraction": float(not self._generating),
            "scoring": float(self._scoring),
            "scoring_capacity": float(d.reward_processes),
            "unsent": float(self._unsent),
            "transfer_s": d.transfer_s,
            "lease_s": sum(leases) / len(leases) if leases else 0.0,
        }
        for name, value in gauges.items():
            report.gauges[name] = value
        return report

    async def work(self, stopped: Callable[[], bool]) -> None:
        loading = asyncio.create_task(self._load(stopped))
        try:
            while not stopped():
                free = self.durations.slots - self._generating
                if self._loaded < 0 or free <= 0:
                    self._room.clear()
                    await self._room.wait()
                    continue
                self.tasks_a_lease = free
                for lease in (await self.lease(WAIT_S)).leases:
                    self._generating += 1
                    group = asyncio.create_task(self._make(lease))
                    self._groups.add(group)
                    group.add_done_callback(self._groups.discard)
        finally:
            loading.cancel()
            for group in self._groups:
                group.cancel()

    async def _load(self, stopped: Callable[[], bool]) -> None:
        """One version after the other; those that came meanwhile are skipped."""
        while not stopped():
            directive = self.session.directive
            newest = -1 if directive is None else directive.version
            if newest > self._loaded:
                await asyncio.sleep(self.durations.transfer_s)
                self._loaded = newest
                self._room.set()
                self.session.poke()
            else:
                await asyncio.sleep(0.005)

    async def _make(self, lease: rollout_pb2.Lease) -> None:
        group = rollout_pb2.Group()
        async with self._slots:
            # Its tokens are of the version with which it began.
            group.CopyFrom(self.group_for(lease))
            await asyncio.sleep(self.durations.generate_s)
        self._generating -= 1
        self._scoring += 1
        self._room.set()
        async with self._scorers:
            await asyncio.sleep(self.durations.reward_s)
        self._scoring -= 1
        group.generate_s, group.reward_s = self.durations.generate_s, self.durations.reward_s
        self._unsent += 1
        try:
            await self.submit(group)
        except RequestRefused:
            self.timings.errors += 1
        finally:
            self._unsent -= 1


class EmulatedPolicy(FakePolicy):
    """Computes for a time that is proportional to its shard, and votes with its times."""

    def __init__(
        self, config: Config, addresses: list[str], worker_id: str, durations: Durations
    ) -> None:
        super().__init__(config, addresses, worker_id)
        self._compute_s = durations.compute_s
        self._idle_since = time.monotonic()
        self._commit_s = 0.0
        self.times: dict[str, float] = {}
        """Seconds of the parts of the step, for its vote."""

    async def vote(self, plan: policy_pb2.StepPlan) -> None:
        planned = time.monotonic()
        self.times = {"time_wait_s": planned - self._idle_since, "time_commit_s": self._commit_s}
        await asyncio.sleep(self._compute_s * len(plan.shard))
        computed = time.monotonic()
        self.times["time_compute_s"] = computed - planned
        await super().vote(plan)
        self._idle_since = time.monotonic()
        self._commit_s = self._idle_since - computed

    def stats(self, plan: policy_pb2.StepPlan) -> dict[str, common_pb2.Stat]:
        times = {n: common_pb2.Stat(sum=t, weight=1.0, max=t) for n, t in self.times.items()}
        return {**super().stats(plan), **times}
