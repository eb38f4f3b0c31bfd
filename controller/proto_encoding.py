"""Protobuf encoding of what workers are sent: directives and plans."""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeVar

from controller.ledger import views
from controller.ledger.enums import DesiredLifecycle, PlanState, Role
from controller.ledger.facts import Member
from controller.ledger.state import State
from paceline.ids import MeshEpoch, TaskId, Version
from paceline.v1 import common_pb2, policy_pb2, worker_pb2

E = TypeVar("E", bound=Enum)


def wire_values(words: type[E], wire: Any, prefix: str) -> dict[E, Any]:
    """Each member of an enum to the value of the same name in the protobuf enum ``wire``."""
    return {word: wire.Value(f"{prefix}_{word.name}") for word in words}


ROLES = wire_values(Role, common_pb2.Role, "ROLE")
_LIFECYCLES = wire_values(DesiredLifecycle, worker_pb2.Lifecycle, "LIFECYCLE")
_PLANS = wire_values(PlanState, policy_pb2.PlanState, "PLAN_STATE")


def directive_of(
    state: State, worker_id: str, incarnation: int, report: worker_pb2.Report
) -> worker_pb2.Directive:
    """Desired state of one worker, without term and seq. ``report`` is its newest."""
    held = [(TaskId(ref.task_id), ref.attempt) for ref in report.held_leases]
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
    state: State, worker_id: str, incarnation: int, request: policy_pb2.PlanRequest
) -> policy_pb2.PlanReply:
    """The present answer to NextPlan."""
    formed, holds = MeshEpoch(request.mesh_epoch), Version(request.state_version)
    kind, view = views.plan(state, worker_id, incarnation, formed, holds)
    reply = policy_pb2.PlanReply(state=_PLANS[kind])
    if view is None:
        return reply
    plan = reply.plan
    plan.step = view.step
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
    for epoch in view.version_epochs:
        plan.version_epochs.add(first_version=epoch.first_version, offset=epoch.offset)
    return reply
