"""Simulated rollout worker: it leases ahead, generates and submits, and loads weights as they come."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from controller.services import rollout as rollout_service
from controller.simulator.oracle import Violation
from controller.simulator.virtual_time import settle
from controller.simulator.worker import Fenced, SimulatedWorker
from paceline.v1 import common_pb2, rollout_pb2, worker_pb2

if TYPE_CHECKING:
    from controller.simulator.policy import SimulatedPolicyWorker
    from controller.simulator.world import World

WAIT_S = 1.0
"""How long a request for tasks may be held."""
PATIENCE_S = 1.5
"""A worker that has waited so long for its answer asks for other tasks instead."""


class SimulatedRolloutWorker(SimulatedWorker):
    role = common_pb2.ROLE_ROLLOUT

    def __init__(self, world: World, worker_id: str) -> None:
        self.running: dict[tuple[str, int], asyncio.Future[str]] = {}
        """Held leases, and what calls them off."""
        self.unnamed: set[tuple[str, int]] = set()
        """Held leases that its reports leave out, as if from a worker that forgot and remembers."""
        self.lease_seq = 0
        self.slots = world.shape.slots
        self.fenced = False
        super().__init__(world, worker_id)

    def held(self) -> list[tuple[str, int]]:
        return [ref for ref in self.running if ref not in self.unnamed]

    def rejoin(self) -> None:
        for off in self.running.values():
            settle(off, "off")
        self.running.clear()
        self.unnamed.clear()
        self.lease_seq = 0
        self.fenced = False

    async def work(self) -> None:
        await asyncio.sleep(self.world.rng.uniform(0.1, 0.5))
        self.lifecycle = worker_pb2.LIFECYCLE_RUNNING
        self._send_report()
        while not self.over:
            self.check()
            if self.fenced:
                raise Fenced("a request was fenced")
            free = self.slots - len(self.running)
            leaving = self.lifecycle == worker_pb2.LIFECYCLE_DRAINING
            if free <= 0 or self.loaded_version < 0 or leaving:
                await self.news(0.6)
                continue
            await self._lease(free)

    async def _lease(self, free: int) -> None:
        self.lease_seq += 1
        request = rollout_pb2.LeaseRequest(
            caller=self.caller,
            lease_seq=self.lease_seq,
            max_tasks=free,
            loaded_version=self.loaded_version,
            wait_s=WAIT_S,
        )
        reply = await self.call(
            rollout_service.lease_tasks, request, wait_s=WAIT_S, patience_s=PATIENCE_S
        )
        if reply is None:  # gives up: what it may have been leased, nobody will ever work at
            return
        for lease in reply.leases:
            off = self.create_future()
            self.running[(lease.task.task_id, lease.task.attempt)] = off
            self.spawn(self._generate(lease, off))
        self.progress += 1
        if not reply.leases:
            await self.news(0.1)

    def directed(self, key: tuple[str, int, int], view: worker_pb2.Directive) -> None:
        super().directed(key, view)
        for ref in self.directive.cancelled if self.directive is not None else ():
            off = self.running.pop((ref.task_id, ref.attempt), None)
            if off is not None:
                settle(off, "off")

    async def _generate(self, lease: rollout_pb2.Lease, off: asyncio.Future[str]) -> None:
        world, ref = self.world, (lease.task.task_id, lease.task.attempt)
        caller, incarnation = self.caller, self.incarnation
        first = self.loaded_version
        fate = world.fate(lease)
        if fate == "kills" and world.rng.random() < 0.8:
            await self.within(off, world.rng.random())
            world.crash(self)
            return
        delay = world.generate_s()
        if world.rng.random() < world.shape.forgetful:
            self.unnamed.add(ref)
            delay += world.rng.uniform(0.0, 2.0) * world.shape.lease_ttl_s
        if await self.within(off, delay) == "off" or incarnation != self.incarnation:
            return
        leaving = self.lifecycle == worker_pb2.LIFECYCLE_DRAINING
        try:
            if fate == "fails":
                await self._give_back(caller, lease, rollout_pb2.RETURN_KIND_FAILED, "reward_error")
            elif fate == "bad":
                await self._give_back(
                    caller, lease, rollout_pb2.RETURN_KIND_DROP, "prompt_too_long"
                )
            elif leaving and world.rng.random() < 0.3:
                await self._give_back(caller, lease, rollout_pb2.RETURN_KIND_HAND_BACK, "draining")
            else:
                await self._submit(caller, world.group(lease, first, self.loaded_version))
        except Fenced:
            self.fenced = self.incarnation == incarnation
        if self.incarnation == incarnation:
            self.running.pop(ref, None)

    async def _submit(self, caller: common_pb2.Caller, group: rollout_pb2.Group) -> None:
        request = rollout_pb2.SubmitRequest(caller=caller, groups=[group])
        reply = await self.call(rollout_service.submit_groups, request)
        (result,) = reply.results
        # Versions that a lost tail of the journal has taken back are refused, and rightly so.
        if result.verdict == rollout_pb2.VERDICT_INVALID and not self.world.oracle.corrupted:
            raise Violation(f"a sound group was refused: {result.message}")

    async def _give_back(
        self,
        caller: common_pb2.Caller,
        lease: rollout_pb2.Lease,
        kind: rollout_pb2.ReturnKind,
        reason: str,
    ) -> None:
        returned = rollout_pb2.ReturnedTask(task=lease.task, kind=kind, reason=reason)
        request = rollout_pb2.ReturnRequest(caller=caller, tasks=[returned])
        await self.call(rollout_service.return_tasks, request)

    def receive(self, sender: SimulatedPolicyWorker, link_epoch: int, version: int) -> None:
        """Weights arrived over a link; loaded and acknowledged if the link is still ours."""
        view = self.directive
        if view is None or all(link.epoch != link_epoch for link in view.links):
            return
        if version > self.loaded_version:
            self.loaded_version = version
            self.progress += 1
            self._send_report()
        self.world.network.send(
            *(self.name, sender, sender.acknowledged),
            *((link_epoch, self.incarnation), self.loaded_version),
        )
