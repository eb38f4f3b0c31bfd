"""Views of the ledger as protobuf messages: directives, plans, status."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from controller.ledger import views
from controller.ledger.commands import Role
from controller.ledger.events import Member
from controller.ledger.fleet import Lifecycle, Worker
from controller.ledger.standby_workers import desired_spares
from controller.ledger.state import State
from paceline.v1 import admin_pb2, common_pb2, policy_pb2, worker_pb2

if TYPE_CHECKING:
    from controller.leader import Leader
    from controller.replicated_controller import Controller

SILENT_S = 5.0
"""A controller says in Redis every second that it is there."""
ROLES = {Role.POLICY: common_pb2.ROLE_POLICY, Role.ROLLOUT: common_pb2.ROLE_ROLLOUT}
_LIFECYCLES = {
    "running": worker_pb2.LIFECYCLE_RUNNING,
    "draining": worker_pb2.LIFECYCLE_DRAINING,
    "stopped": worker_pb2.LIFECYCLE_STOPPED,
    "rejoin": worker_pb2.LIFECYCLE_REJOIN,
}
_PLANS = {
    "open": policy_pb2.PLAN_STATE_OPEN,
    "wait": policy_pb2.PLAN_STATE_WAIT,
    "epoch_over": policy_pb2.PLAN_STATE_EPOCH_OVER,
    "finished": policy_pb2.PLAN_STATE_FINISHED,
}


def directive_of(
    state: State, worker_id: str, incarnation: int, report: worker_pb2.Report
) -> worker_pb2.Directive:
    """What should be true of one worker, without term and seq. ``report`` is its newest."""
    held = [(ref.task_id, ref.attempt) for ref in report.held_leases]
    view = views.directive(state, worker_id, incarnation, held)
    directive = worker_pb2.Directive(
        lifecycle=_LIFECYCLES[view.lifecycle],
        version=view.version,
        paused=view.paused,
        checkpoint_step=view.checkpoint_step,
    )
    if view.mesh is not None:
        mesh = directive.mesh
        mesh.epoch = view.mesh.epoch
        mesh.state_version = view.mesh.state_version
        mesh.step = view.mesh.step
        mesh.source_rank = view.mesh.source_rank
        mesh.restore = view.mesh.restore
        mesh.checkpoint_path = view.mesh.checkpoint_path
        for member in view.mesh.members:
            _fill_member(mesh.members.add(), member)
    for link in view.links:
        message = directive.links.add(epoch=link.epoch)
        _fill_member(message.publisher, link.publisher)
        _fill_member(message.receiver, link.receiver)
    for task_id, attempt in view.cancelled:
        directive.cancelled.add(task_id=task_id, attempt=attempt)
    return directive


def _fill_member(message: worker_pb2.MeshMember, member: Member) -> None:
    message.worker_id = member.worker_id
    message.incarnation = member.incarnation
    message.tensor_host = member.tensor_host
    message.needs_state = member.needs_state


def plan_of(
    state: State, worker_id: str, incarnation: int, mesh_epoch: int, state_version: int
) -> policy_pb2.PlanReply:
    """The answer to NextPlan as of now."""
    kind, view = views.plan(state, worker_id, incarnation, mesh_epoch, state_version)
    reply = policy_pb2.PlanReply(state=_PLANS[kind])
    if view is None:
        return reply
    plan = reply.plan
    plan.step = view.step
    plan.round = view.round
    plan.mesh_epoch = view.mesh_epoch
    plan.version = view.version
    plan.next_version = view.next_version
    plan.total_tokens = view.total_tokens
    plan.total_sequences = view.total_sequences
    plan.total_groups = view.total_groups
    plan.rank = view.rank
    plan.size = view.size
    for task_id, attempt in view.shard:
        plan.shard.add(task_id=task_id, attempt=attempt)
    for first_version, offset in view.lines:
        plan.lines.add(first_version=first_version, offset=offset)
    return reply


def status_of(controller: Controller) -> admin_pb2.StatusReply:
    """The whole picture, from a leader's live ledger or a standby's copy."""
    leader = controller.leader
    state = controller.state
    view = views.status(state)
    trouble = leader.trouble if leader is not None else controller.trouble
    reply = admin_pb2.StatusReply(
        run_id=controller.config.run.name,
        run_name=controller.config.run.name,
        phase=view.phase if state.ended or not trouble else trouble,
        leader=view.leader,
        term=view.term,
        step=view.step,
        total_steps=view.total_steps or controller.config.train.steps,
        version=view.version,
        mesh_epoch=view.mesh_epoch,
        desired=view.desired,
        metrics=view.metrics,
        failovers=view.failovers,
        mesh_rebuilds=view.mesh_rebuilds,
        reason=view.reason,
        checkpoint_step=view.checkpoint_step,
        clock_s=controller.clock.time(),
        tasks=admin_pb2.TaskCounts(**asdict(view.tasks)),
    )
    if spares := desired_spares(state):
        reply.spares["rollout"] = spares
    if leader is not None:
        reply.provider_trouble = leader.provider_trouble
        if leader.proposal is not None:
            counts = leader.proposal.counts
            reply.proposed.update({"policy": counts.policy, "rollout": counts.rollout})
            reply.proposed_why = leader.proposal.why
    for worker in state.fleet.workers.values():
        _add_worker(reply, state, worker, leader)
    for seen in controllers_of(controller):
        reply.controllers.add(**seen)
    return reply


def controllers_of(controller: Controller) -> Iterator[dict[str, Any]]:
    """Every controller heard of lately, by the names of ``ControllerStatus``'s fields."""
    leader = controller.state.leader
    now = controller.clock.time()
    for controller_id, seen in sorted(controller.peers.items()):
        age_s = max(0.0, now - seen["t"])
        # The ledger says who leads: what a process last said of itself may be out of date.
        state = "leader" if controller_id == leader else "standby"
        yield {
            "controller_id": controller_id,
            "address": seen["address"],
            "rest": str(seen.get("rest") or ""),
            "state": state if age_s < SILENT_S else "silent",
            "pid": seen["pid"],
            "host": seen["host"],
            "heartbeat_age_s": round(age_s, 3),
        }


def _add_worker(
    reply: admin_pb2.StatusReply, state: State, worker: Worker, leader: Leader | None
) -> None:
    mesh = state.fleet.mesh
    member = (
        mesh is not None
        and not mesh.broken
        and mesh.rank(worker.worker_id, worker.incarnation) >= 0
    )
    policy = worker.role is Role.POLICY
    status = reply.workers.add(
        worker_id=worker.worker_id,
        role=ROLES[worker.role],
        host=worker.host,
        pid=worker.pid,
        state=str(worker.lifecycle),
        mesh_epoch=mesh.epoch if member and mesh is not None else 0,
        version=worker.state_version if policy else worker.loaded_version,
        held_leases=len(worker.held),
        incarnation=worker.incarnation,
        # Only the leader hears heartbeats.
        heartbeat_age_s=-1.0,
    )
    if worker.spare and worker.lifecycle is Lifecycle.RUNNING:
        status.state = "spare"
    if not worker.alive:
        return
    # Here too: who heard of a drain by its lower number alone would let a second worker go.
    if worker.leaving:
        status.state = "draining"
    if leader is not None:
        leader.describe(worker, status)
