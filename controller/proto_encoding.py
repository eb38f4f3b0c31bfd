"""Protobuf encoding of what workers are sent: directives and plans."""

from __future__ import annotations

from controller.ledger import views
from controller.ledger.events import Member
from controller.ledger.state import State
from paceline.v1 import policy_pb2, worker_pb2

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
