"""A rollout worker: lease ahead, generate, submit; load weights as they come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.ledger import commands as cmd
from controller.ledger.enums import ReturnKind
from controller.simulator.loop import Future
from controller.simulator.worker import Fenced, SimulatedWorker
from paceline.ids import Version

if TYPE_CHECKING:
    from controller.simulator.policy import PolicyWorker
    from controller.simulator.world import World


class RolloutWorker(SimulatedWorker):
    role = cmd.Role.ROLLOUT

    def __init__(self, world: World, worker_id: str) -> None:
        self.running: dict[tuple[str, int], Future] = {}
        """Held leases, and what calls them off."""
        self.unnamed: set[tuple[str, int]] = set()
        """Held leases that its reports leave out, as if from a worker that forgot and remembers."""
        self.lease_seq = 0
        self.slots = world.slots
        self.fenced = False
        super().__init__(world, worker_id)

    def held(self) -> list[tuple[str, int]]:
        return [ref for ref in self.running if ref not in self.unnamed]

    def rejoin(self) -> None:
        for off in self.running.values():
            off.set("off")
        self.running.clear()
        self.unnamed.clear()
        self.lease_seq = 0
        self.fenced = False

    async def work(self) -> None:
        await self.sleep(self.world.rng.uniform(0.1, 0.5))
        self.lifecycle = "running"
        self._send_report()
        while not self.over:
            self.check()
            if self.fenced:
                raise Fenced("a request was fenced")
            free = self.slots - len(self.running)
            if free <= 0 or self.loaded_version < 0 or self.lifecycle == "draining":
                await self.news(0.6)
                continue
            self.lease_seq += 1
            result = await self.call(
                cmd.LeaseTasks(
                    self.worker_id,
                    self.incarnation,
                    self.lease_seq,
                    free,
                    Version(self.loaded_version),
                ),
                patience=1.5,
            )
            if result is None:  # gives up: what it may have been leased, nobody will ever work at
                continue
            for lease in result.leases:
                self.running[(lease.task_id, lease.attempt)] = Future()
                self.spawn(self._generate(lease, self.incarnation))
            self.progress += 1
            if not result.leases:
                await self.news(0.6)

    def directed(self, incarnation: int, order: tuple[int, int], view: object) -> None:
        super().directed(incarnation, order, view)  # type: ignore[arg-type]
        for ref in self.directive.cancelled if self.directive else ():
            off = self.running.pop(ref, None)
            if off is not None:
                off.set("off")

    async def _generate(self, lease: cmd.LeasedTask, incarnation: int) -> None:
        world, ref = self.world, (lease.task_id, lease.attempt)
        off = self.running[ref]
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
        try:
            if fate == "fails":
                await self._give_back(lease, "failed", "reward_error")
            elif fate == "bad":
                await self._give_back(lease, "drop", "prompt_too_long")
            elif self.lifecycle == "draining" and world.rng.random() < 0.3:
                await self._give_back(lease, "hand_back", "draining")
            else:
                group = world.group(lease, first, self.loaded_version)
                await self.call(cmd.AcceptGroup(self.worker_id, incarnation, group))
        except Fenced:
            self.fenced = self.incarnation == incarnation
        if self.incarnation == incarnation:
            self.running.pop(ref, None)

    async def _give_back(self, lease: cmd.LeasedTask, kind: str, reason: str) -> None:
        await self.call(
            cmd.ReturnTask(
                self.worker_id,
                self.incarnation,
                lease.task_id,
                lease.attempt,
                ReturnKind(kind),
                reason,
            )
        )

    def receive(self, sender: PolicyWorker, link_epoch: int, version: int) -> None:
        """Weights arrived over a link; loaded and acknowledged if the link is still ours."""
        view = self.directive
        if view is None or all(link.epoch != link_epoch for link in view.links):
            return
        if version > self.loaded_version:
            self.loaded_version = version
            self.progress += 1
            self._send_report()
        self.world.network.send(
            self.name, sender, sender.acknowledged, link_epoch, self.loaded_version
        )
