"""A policy replica: converge to the mesh, then step after step until its epoch is over.

    directive ──► form epoch ──► restore, or be seeded ──► plan ─► accumulate ─► reduce ─► vote
                     ▲                                      ▲                               │
                     └────────── epoch over ────────────────┴────────── committed ◄─────────┘

Weights are a hash of everything they were trained on, so that a group lost, doubled or trained by
only some of the replicas shows at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from controller.ledger import commands as cmd
from controller.ledger.views import MeshView, PlanView
from controller.simulator.control import Query
from controller.simulator.loop import Future
from controller.simulator.members import ERROR, SimulatedEpoch, Weights
from controller.simulator.oracle import Violation, next_state
from controller.simulator.worker import Fenced, SimulatedWorker
from paceline.ids import Step, Version

if TYPE_CHECKING:
    from controller.simulator.world import World


class PolicyWorker(SimulatedWorker):
    role = cmd.Role.POLICY

    def __init__(self, world: World, worker_id: str) -> None:
        self.state = ""
        self.epoch = 0
        """Newest epoch it has set out to form; it never comes back to one."""
        self.accumulated: set[str] = set()
        self.accumulated_for = (0, 0, 0, 0)
        self.saved_step = 0
        self.saving = False
        self.sent: dict[int, int] = {}
        """Newest version acknowledged, by link epoch."""
        super().__init__(world, worker_id)

    def rejoin(self) -> None:
        self.accumulated.clear()

    async def work(self) -> None:
        await self.sleep(self.world.rng.uniform(0.1, 1.0))
        self.lifecycle = "running"
        self._send_report()
        self.spawn(self._publish(self.incarnation))
        while not self.over:
            mesh = self.directive.mesh if self.directive else None
            if mesh is None or mesh.epoch == self.epoch or not await self._converge(mesh):
                await self.news()
                continue
            await self._train(mesh)
            while not self.over and self._current(mesh):
                await self.news()

    def _current(self, mesh: MeshView) -> bool:
        now = self.directive.mesh if self.directive else None
        return now is not None and now.epoch == mesh.epoch

    async def _until(self, future: Future, mesh: MeshView) -> bool:
        """Waits for ``future`` as long as the epoch is not called off; whether it is there."""
        while not future.done and self._current(mesh):
            await self.within(future, 0.5)
            self.check()
        return bool(future.done)

    async def _converge(self, mesh: MeshView) -> bool:
        """Forms the epoch and holds its state; False where it was called off first."""
        world, me = self.world, (self.worker_id, self.incarnation)
        self.epoch = mesh.epoch
        epoch = world.epochs.setdefault(mesh.epoch, SimulatedEpoch(world, mesh))
        rank = next(r for r, m in enumerate(mesh.members) if (m.worker_id, m.incarnation) == me)
        if mesh.restore:
            self.accumulated.clear()
            await self.sleep(world.rng.uniform(0.1, 0.6))
            self.state = world.checkpoints[mesh.checkpoint_path].state
            self._hold(mesh.state_version)
        elif mesh.members[rank].needs_state:
            self.accumulated.clear()
        elif self.state_version != mesh.state_version:
            raise Violation(
                f"{self.name} holds {self.state_version}, epoch {mesh.epoch} needs "
                f"{mesh.state_version}"
            )
        formed = epoch.join(self, (-1, 0))
        if not await self._until(formed, mesh):
            return False
        if formed.value == ERROR:
            await self._complain(mesh)
            return False
        if mesh.members[rank].needs_state:
            seed = epoch.seed(mesh.members[mesh.source_rank].worker_id)
            await self.sleep(world.rng.uniform(0.05, 0.4))
            if seed is None or not self._current(mesh):
                await self._complain(mesh)
                return False
            self.state = seed
            self._hold(mesh.state_version)
        return self._current(mesh)

    def _hold(self, version: int) -> None:
        self.state_version = version
        self.progress += 1
        self.world.oracle.holds(self.worker_id, version, self.state)
        self._send_report()

    async def _complain(self, mesh: MeshView) -> None:
        if self._current(mesh):
            await self.call(
                cmd.BreakMesh(self.worker_id, self.incarnation, mesh.epoch, "collective failed")
            )

    async def _train(self, mesh: MeshView) -> None:
        """Steps until the epoch is over."""
        world = self.world
        epoch = world.epochs[mesh.epoch]
        while self._current(mesh) and not self.over:
            self._maybe_save(mesh)
            kind, plan = await self.call(
                Query(self.worker_id, self.incarnation, mesh.epoch, self.state_version)
            )
            if kind == "epoch_over":
                return
            if kind != "open":
                await self.news(0.6)
                continue
            if not await self._accumulate(mesh, plan):
                return
            self.busy = False
            reduced = epoch.join(self, (plan.step, plan.mesh_epoch), frozenset(self.accumulated))
            if not await self._until(reduced, mesh):
                return
            if reduced.value == ERROR:
                await self._complain(mesh)
                return
            if not await self._vote(plan, reduced.value):
                return

    async def _accumulate(self, mesh: MeshView, plan: PlanView) -> bool:
        """Gradients of the shard, on top of what was accumulated in an earlier epoch."""
        facts = (plan.step, plan.version, plan.total_tokens, plan.total_sequences)
        shard = {task_id for task_id, _ in plan.shard}
        # Opened anew after an abort, the same step may have other groups.
        if self.accumulated_for != facts or not self.accumulated <= shard:
            self.accumulated.clear()
            self.accumulated_for = facts
        self.busy = True
        for task_id, attempt in plan.shard:
            if task_id in self.accumulated:
                continue
            if (task_id, attempt) not in self.world.store.payloads:
                if self.world.oracle.may_train(self.worker_id, self.incarnation, plan):
                    raise Violation(f"the payload of {task_id}/{attempt} is gone")
                await self.news()  # it asks for what others have committed without it
                return False
            await (Future() if self.wedged else self.sleep(self.world.group_s()))
            self.check()
            self.accumulated.add(task_id)
            self.progress += 1
            if not self._current(mesh):
                self.busy = False
                return False
        return True

    async def _vote(self, plan: PlanView, reduced: frozenset[str]) -> bool:
        """Whether the step committed; its outcome is known before anything else is done."""
        command = cmd.CastVote(
            self.worker_id,
            self.incarnation,
            plan.step,
            plan.mesh_epoch,
            self.state,
            {"loss": cmd.StatValue(1.0, 1.0, 1.0)},
        )
        while True:
            result = await self.call(command)
            if result.outcome == "retry":
                return False
            if result.outcome == "committed":
                break
            await self.within(self._changed, 0.2)
        self.state = next_state(self.state, reduced)
        self.accumulated.clear()
        self._hold(plan.next_version)
        return True

    # ---- beside the step loop -------------------------------------------------------------

    def _maybe_save(self, mesh: MeshView) -> None:
        wanted = self.directive.checkpoint_step if self.directive else 0
        step = self.world.oracle.versions.get(self.state_version, 0)
        leads = mesh.members[0].worker_id == self.worker_id
        if not (leads and wanted and step >= wanted) or self.saving:
            return
        if self.saved_step >= wanted:
            return
        self.saving = True
        self.spawn(self._save(step, Weights(self.state_version, self.state)))

    async def _save(self, step: int, weights: Weights) -> None:
        await self.sleep(self.world.rng.uniform(0.1, 1.5))
        path = f"checkpoints/{step}-{weights.version}"
        self.world.checkpoints.setdefault(path, weights)
        try:
            await self.call(
                cmd.RecordCheckpoint(
                    self.worker_id, self.incarnation, Step(step), Version(weights.version), path
                )
            )
            self.saved_step = step
        except Fenced:
            pass
        self.saving = False

    async def _publish(self, incarnation: int) -> None:
        """Sends the newest weights over every link whose receiver has not got them."""
        while self.incarnation == incarnation:
            view = self.directive
            for link in view.links if view else ():
                if link.publisher.worker_id != self.worker_id or self.state_version < 0:
                    continue
                if self.sent.get(link.epoch, -1) < self.state_version:
                    self.world.send_weights(self, link, self.state_version)
            await self.sleep(0.4)

    def acknowledged(self, link_epoch: int, version: int) -> None:
        self.sent[link_epoch] = max(version, self.sent.get(link_epoch, -1))
