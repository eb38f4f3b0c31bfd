"""Protobuf encoding of the ledger's views: directives and plans."""

from collections.abc import Iterable
from dataclasses import fields
from enum import Enum
from functools import cache
from typing import Any, TypeVar

from google.protobuf.message import Message

from controller.ledger.enums import DesiredLifecycle, PlanState, Role
from controller.ledger.specs import Member
from controller.ledger.state.state import State
from controller.ledger.views import views
from paceline.ids import MeshEpoch, TaskId, Version
from paceline.v1 import common_pb2, policy_pb2, worker_pb2

E = TypeVar("E", bound=Enum)
M = TypeVar("M", bound=Message)


def wire_values(words: type[E], wire: Any, prefix: str) -> dict[E, Any]:
    """Each member of an enum to the value of the same name in the protobuf enum ``wire``."""
    return {word: wire.Value(f"{prefix}_{word.name}") for word in words}


ROLES = wire_values(Role, common_pb2.Role, "ROLE")
_LIFECYCLES = wire_values(DesiredLifecycle, worker_pb2.Lifecycle, "LIFECYCLE")
_PLANS = wire_values(PlanState, policy_pb2.PlanState, "PLAN_STATE")


def message_of(kind: type[M], view: Any, **other: Any) -> M:
    """The message with the fields of the dataclass ``view``; ``other``: those that differ."""
    classes: Any = kind, type(view)
    names = _shared_names(*classes)
    message: M = kind(**{n: getattr(view, n) for n in names if n not in other}, **other)
    return message


@cache
def _shared_names(kind: Any, view: Any) -> tuple[str, ...]:
    return tuple(f.name for f in fields(view) if f.name in kind.DESCRIPTOR.fields_by_name)


def directive_of(
    state: State, worker_id: str, incarnation: int, report: worker_pb2.Report
) -> worker_pb2.Directive:
    """Desired state of one worker, without term and seq. ``report`` is its newest."""
    held = [(TaskId(ref.task_id), ref.attempt) for ref in report.held_leases]
    view = views.directive(state, worker_id, incarnation, held)
    mesh = None
    if view.mesh is not None:
        members = [_member(member) for member in view.mesh.members]
        mesh = message_of(worker_pb2.PolicyMesh, view.mesh, members=members)
    links = [
        worker_pb2.WeightsLink(
            epoch=link.generation,
            publisher=_member(link.publisher),
            receiver=_member(link.receiver),
            reload=link.reload,
            tree=link.tree,
            relayed=link.relayed,
        )
        for link in view.links
    ]
    return message_of(
        worker_pb2.Directive,
        view,
        lifecycle=_LIFECYCLES[view.lifecycle],
        mesh=mesh,
        links=links,
        cancelled=_task_refs(view.cancelled),
        scorers=[message_of(worker_pb2.Scorer, scorer) for scorer in view.scorers],
    )


def plan_of(
    state: State, worker_id: str, incarnation: int, request: policy_pb2.PlanRequest
) -> policy_pb2.PlanReply:
    """The present answer to NextPlan."""
    formed, holds = MeshEpoch(request.mesh_epoch), Version(request.state_version)
    kind, view = views.plan(state, worker_id, incarnation, formed, holds)
    plan = None
    if view is not None:
        epochs = [message_of(policy_pb2.VersionEpoch, epoch) for epoch in view.version_epochs]
        shard = _task_refs(view.shard)
        groups = [
            message_of(policy_pb2.PlannedGroup, group, suspect=group.task_id in view.suspects)
            for group in view.groups
        ]
        plan = message_of(
            policy_pb2.StepPlan, view, shard=shard, groups=groups, version_epochs=epochs
        )
    due = state.versions.step if kind is PlanState.EVALUATE else None
    return policy_pb2.PlanReply(state=_PLANS[kind], plan=plan, evaluate_step=due)


def _member(member: Member) -> worker_pb2.MeshMember:
    return worker_pb2.MeshMember(
        worker_id=member.worker_id,
        incarnation=member.incarnation,
        tensor_host=member.tensor_host,
        needs_state=member.needs_state,
    )


def _task_refs(refs: Iterable[tuple[TaskId, int]]) -> list[common_pb2.TaskRef]:
    return [common_pb2.TaskRef(task_id=task_id, attempt=attempt) for task_id, attempt in refs]
