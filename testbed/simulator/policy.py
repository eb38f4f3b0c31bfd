"""Simulated policy replica: mesh epochs, training steps and votes, without a model.

    directive ──► form epoch ──► restore, or receive ──► plan ─► accumulate ─► reduce ─► vote
                     ▲                                      ▲                               │
                     └────────── epoch over ────────────────┴────────── committed ◄─────────┘

Weights are a hash of everything they were trained on, so that a group lost, doubled or trained by
only some of the replicas shows at once.
"""

import asyncio
import math
from collections.abc import Callable
from typing import Any

from controller.services import policy as policy_service
from controller.services import worker as worker_service
from paceline.ids import TaskId
from paceline.v1 import common_pb2, policy_pb2, worker_pb2
from testbed.simulator.cluster import Cluster
from testbed.simulator.gradient_mesh import ERROR, Weights
from testbed.simulator.oracles.ledger import Violation, next_state
from testbed.simulator.worker import SEND_S, Fenced, SentWeights, SimulatedWorker

FORM_S = 10.0
"""Time limit of a rendezvous."""
WAIT_S = 2.0
"""How long a request for a plan or a vote may be held."""


class EpochLost(Exception):
    """The epoch was called off, or this replica cannot go on in it."""


class SimulatedPolicyWorker(SimulatedWorker):
    role = common_pb2.ROLE_POLICY

    def __init__(
        self, cluster: Cluster, name: str, exited: Callable[[SimulatedWorker, int], None]
    ) -> None:
        super().__init__(cluster, name, exited)
        self.state = ""
        self.epoch = 0
        """Newest epoch it has set out to form; it never comes back to one."""
        self.accumulated: set[str] = set()
        self.accumulated_for = (0, 0, 0, 0)
        self.saved = (0, 0)
        """Term and step of the newest record: a later leader may have lost it, and asks again."""
        self.saving = False
        self.damaged_at_save = False
        """A bit of its memory flips just before its next checkpoint."""
        self.sent = SentWeights()

    def rejoin(self) -> None:
        self.accumulated.clear()

    async def work(self) -> None:
        await asyncio.sleep(self.rng.uniform(0.1, 1.0))
        self.lifecycle = worker_pb2.LIFECYCLE_RUNNING
        self._send_report()
        self.spawn(self._publish(self.incarnation))
        while not self.over:
            await self.take_seat()
            mesh = self._mesh
            if mesh is None or mesh.epoch <= self.epoch:
                await self.news()
                if mesh is not None and self._current(mesh):
                    # It has left this epoch, and the controller may not know: it says so again.
                    await self._complain(mesh)
                continue
            formed = False
            try:
                await self._converge(mesh)
                formed = True
                await self._train(mesh)
            except EpochLost:
                await self._complain(mesh)
                if not formed:
                    await self.news()

    def while_parked(self) -> None:
        """A checkpoint is written from host memory."""
        if self._mesh is not None and self._mesh.epoch == self.epoch:
            self._maybe_save(self._mesh)

    @property
    def _mesh(self) -> worker_pb2.PolicyMesh | None:
        return self.directive.mesh if self.directive.HasField("mesh") else None

    def _current(self, mesh: worker_pb2.PolicyMesh) -> bool:
        now = self._mesh
        return now is not None and now.epoch == mesh.epoch

    async def _joined(
        self,
        collective: asyncio.Future[Any],
        mesh: worker_pb2.PolicyMesh,
        limit_s: float = math.inf,
    ) -> Any:
        """Result of the collective. Raises EpochLost."""
        last = self.time() + limit_s
        while not collective.done() and self._current(mesh) and self.time() < last:
            await self.within(collective, 0.5)
            self.check()
        if not collective.done() or collective.result() == ERROR:
            raise EpochLost
        return collective.result()

    async def _converge(self, mesh: worker_pb2.PolicyMesh) -> None:
        """Forms the epoch and holds its state. Raises EpochLost."""
        cluster, me = self.cluster, (self.name, self.incarnation)
        self.epoch = mesh.epoch
        epoch = cluster.epoch(mesh)
        (needs_state,) = (m.needs_state for m in mesh.members if (m.worker_id, m.incarnation) == me)
        if mesh.restore or needs_state:
            self.accumulated.clear()
        if mesh.restore:
            await asyncio.sleep(self.rng.uniform(0.1, 0.6))
            checkpoint = cluster.checkpoints[mesh.checkpoint_path]
            cluster.oracle.restored(mesh.checkpoint_path, checkpoint.version, checkpoint.state)
            self.state = checkpoint.state
            self._hold(mesh.state_version)
        elif not needs_state and self.state_version != mesh.state_version:
            if cluster.oracle.corrupted:  # what it holds was committed in a tail that is lost
                raise EpochLost
            raise Violation(
                f"{self.name} holds {self.state_version}, epoch {mesh.epoch} needs "
                f"{mesh.state_version}"
            )
        await self._joined(epoch.meet(self, Weights(self.state_version, self.state)), mesh, FORM_S)
        if needs_state:
            state = epoch.transferred(mesh.members[mesh.source_rank].worker_id)
            await asyncio.sleep(self.rng.uniform(0.05, 0.4))
            if state is None or not self._current(mesh):
                raise EpochLost
            self.state = state
            self.saved = (0, 0)  # what it saved of this version may have been outvoted
            self._hold(mesh.state_version)
        if not self._current(mesh):
            raise EpochLost

    def _hold(self, version: int) -> None:
        self.state_version = version
        # What was sent beyond it was never committed: those numbers will name other weights.
        self.sent.forget_after(version)
        self.progress += 1
        self.cluster.oracle.holds(self.name, version, self.state)
        self._send_report()

    async def _complain(self, mesh: worker_pb2.PolicyMesh) -> None:
        if self._current(mesh):
            error = worker_pb2.PeerError(caller=self.caller, epoch=mesh.epoch, detail="failed")
            await self.call(worker_service.report_peer_error, error)

    async def _train(self, mesh: worker_pb2.PolicyMesh) -> None:
        """Steps until the epoch is over. Raises EpochLost."""
        epoch = self.cluster.epoch(mesh)
        while self._current(mesh) and not self.over:
            self._maybe_save(mesh)
            await self.take_seat()
            if not self._current(mesh):
                return
            request = policy_pb2.PlanRequest(
                caller=self.caller,
                mesh_epoch=mesh.epoch,
                state_version=self.state_version,
                wait_s=WAIT_S,
            )
            reply = await self.call(policy_service.next_plan, request, wait_s=WAIT_S)
            plan = reply.plan
            if reply.state == policy_pb2.PLAN_STATE_EPOCH_OVER:
                return
            if reply.state == policy_pb2.PLAN_STATE_EVALUATE:
                await self._evaluate(reply.evaluate_step)
                continue
            if reply.state == policy_pb2.PLAN_STATE_FINISHED:
                await self.news(0.6)
            if reply.state != policy_pb2.PLAN_STATE_OPEN:
                self.check()
                continue
            if not await self._accumulate(mesh, plan):
                continue
            self.busy = False
            gradients = frozenset(self.accumulated)
            reduced = epoch.join(self, (plan.step, plan.mesh_epoch), gradients)
            await self._vote(plan, await self._joined(reduced, mesh))

    async def _evaluate(self, step: int) -> None:
        """The held-out rows of a run of recorded data."""
        version = self.state_version
        await asyncio.sleep(self.cluster.shape.group_s(self.rng))
        self.check()
        loss = common_pb2.Stat(sum=1.0 / (1 + step), weight=1.0)
        request = policy_pb2.HeldOutMeasured(
            caller=self.caller, step=step, version=version, rows=2, stats={"loss": loss}
        )
        await self.call(policy_service.record_held_out, request)

    async def _accumulate(self, mesh: worker_pb2.PolicyMesh, plan: policy_pb2.StepPlan) -> bool:
        """Gradients of the shard, on top of what an earlier epoch has accumulated."""
        totals = (plan.step, plan.version, plan.total_tokens, plan.total_sequences)
        shard = {ref.task_id for ref in plan.shard}
        # Opened anew after an abort, the same step may have other groups.
        if self.accumulated_for != totals or not self.accumulated <= shard:
            self.accumulated.clear()
            self.accumulated_for = totals
            if self.cluster.oracle.may_train(self.name, self.incarnation, plan):
                self.cluster.oracle.planned(plan)
        self.busy = True
        suspects = {
            ref.task_id for ref, of in zip(plan.shard, plan.groups, strict=True) if of.suspect
        }
        for ref in sorted(plan.shard, key=lambda ref: ref.task_id in suspects):
            task_id, attempt = ref.task_id, ref.attempt
            if task_id in self.accumulated:
                continue
            if task_id in suspects and not await self._try(plan, task_id):
                return False
            fate = self.cluster.shape.group_fates.get(int(task_id[1:]))
            if fate and (fate != "vanishes" or attempt == 1):
                await self._fail(plan, ref, fate)
                return False
            if (task_id, attempt) not in self.cluster.redis.payloads:
                if (task_id, attempt) in self.cluster.redis.lost:
                    await self._report(plan, ref, policy_pb2.GROUP_FAULT_PAYLOAD_LOST)
                    return False
                if self.cluster.oracle.may_train(self.name, self.incarnation, plan):
                    raise Violation(f"the payload of {task_id}/{attempt} is gone")
                await self.news()  # it asks for what others have committed without it
                return False
            if self.wedged:
                await self.create_future()
            await asyncio.sleep(self.cluster.shape.group_s(self.rng))
            self.check()
            self.accumulated.add(task_id)
            self.progress += 1
            if not self._current(mesh):
                self.busy = False
                return False
        return not suspects or await self._try(plan, "")

    async def _try(self, plan: policy_pb2.StepPlan, task_id: str) -> bool:
        """Says which suspect it computes next; False if the attempt at the step is over."""
        request = policy_pb2.TryRequest(
            caller=self.caller, step=plan.step, mesh_epoch=plan.mesh_epoch, task_id=task_id
        )
        reply = await self.call(policy_service.try_group, request)
        if not reply.stands:
            await self.news(0.5)
        return bool(reply.stands)

    async def _fail(self, plan: policy_pb2.StepPlan, ref: common_pb2.TaskRef, fate: str) -> None:
        """The group cannot be trained: the replica dies of it, or can say which one it was."""
        await asyncio.sleep(self.rng.random() * self.cluster.shape.group_s(self.rng))
        if fate == "kills":
            self.exit(1)
            return
        fault = policy_pb2.GROUP_FAULT_PAYLOAD_INVALID
        if fate == "vanishes":
            self.cluster.redis.lose((TaskId(ref.task_id), ref.attempt))
            fault = policy_pb2.GROUP_FAULT_PAYLOAD_LOST
        await self._report(plan, ref, fault)

    async def _report(
        self, plan: policy_pb2.StepPlan, ref: common_pb2.TaskRef, fault: policy_pb2.GroupFault
    ) -> None:
        self.busy = False
        request = policy_pb2.RejectRequest(
            caller=self.caller, step=plan.step, groups=[ref], fault=fault
        )
        await self.call(policy_service.reject_groups, request)
        await self.news(0.5)

    async def _vote(self, plan: policy_pb2.StepPlan, reduced: frozenset[str]) -> None:
        """Returns once the outcome is known: nothing else is done before."""
        request = policy_pb2.VoteRequest(
            caller=self.caller,
            step=plan.step,
            mesh_epoch=plan.mesh_epoch,
            weights_digest=self.state,
            stats={"loss": common_pb2.Stat(sum=1.0, weight=1.0, max=1.0)},
            wait_s=WAIT_S,
            term=plan.term,
        )
        while True:
            result = await self.call(policy_service.vote, request, wait_s=WAIT_S)
            if result.outcome == policy_pb2.OUTCOME_RETRY:
                return
            if result.outcome == policy_pb2.OUTCOME_COMMITTED:
                break
        self.state = next_state(self.state, reduced, plan.lr)
        self.accumulated.clear()
        self._hold(plan.next_version)

    # ---- beside the step loop -------------------------------------------------------------

    def _maybe_save(self, mesh: worker_pb2.PolicyMesh) -> None:
        wanted = self.directive.checkpoint_step
        step = self.cluster.oracle.versions.get(self.state_version, 0)
        leads = mesh.members[0].worker_id == self.name
        if not (leads and wanted and step >= wanted) or self.saving:
            return
        if self.saved >= (self._order[0], wanted):
            return
        self.saving = True
        if self.damaged_at_save:
            self.damaged_at_save = False
            self.cluster.oracle.corrupt()
            self.state += "!"
        self.spawn(self._save(step, Weights(self.state_version, self.state)))

    async def _save(self, step: int, weights: Weights) -> None:
        await asyncio.sleep(self.rng.uniform(0.1, 1.5))
        path = f"{self.name}/v{weights.version}/checkpoints/step-{step}"
        self.cluster.checkpoints[path] = weights
        try:
            record = policy_pb2.CheckpointRequest(
                caller=self.caller,
                step=step,
                version=weights.version,
                path=path,
                weights_digest=weights.state,
            )
            reply = await self.call(policy_service.record_checkpoint, record)
            if path not in reply.obsolete_paths:
                self.saved = (self._order[0], step)
            elif weights.state.endswith("!"):
                self.cluster.oracle.counts["refused checkpoints"] += 1
        except Fenced:
            pass
        self.saving = False

    async def _publish(self, incarnation: int) -> None:
        """Sends the newest weights over every link whose receiver has not got them."""
        while self.incarnation == incarnation:
            if self.state_version >= 0:
                origin = (self.name, incarnation)
                self.sent.offer(self, self, Weights(self.state_version, self.state, origin), None)
            await asyncio.sleep(SEND_S)
