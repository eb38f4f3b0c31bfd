"""Directives: the desired state of one worker, as a message, from the ledger's state."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import Message

from controller.ledger.enums import Lifecycle, Phase, Role
from controller.ledger.state.fleet import Worker
from controller.ledger.state.state import State
from controller.ledger.views import due_checkpoint, is_leased
from paceline.ids import TaskId
from paceline.v1 import common_pb2, worker_pb2

E = TypeVar("E", bound=Enum)
M = TypeVar("M", bound=Message)


def wire_values(words: type[E], wire: Any, prefix: str) -> dict[E, Any]:
    """Each member of an enum to the value of the same name in the protobuf enum ``wire``."""
    return {word: wire.Value(f"{prefix}_{word.name}") for word in words}


ROLES = wire_values(Role, common_pb2.Role, "ROLE")


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
    fleet = state.fleet
    worker = fleet.current(worker_id, incarnation)
    directive = worker_pb2.Directive(
        version=state.versions.version,
        stored_weights=state.versions.stored,
        paused=state.paused,
        cancelled=[
            held
            for held in report.held_leases
            if not is_leased(state, worker_id, TaskId(held.task_id), held.attempt)
        ],
    )
    if worker is None or state.ended:
        # Another process may live under this worker id. If this one registered again, the two would
        # take the place from each other forever.
        holder = fleet.workers.get(worker_id)
        succeeded = holder is not None and holder.alive and holder.incarnation != incarnation
        over = state.ended or succeeded
        directive.lifecycle = worker_pb2.LIFECYCLE_STOPPED if over else worker_pb2.LIFECYCLE_REJOIN
        return directive
    mesh = fleet.whole_mesh
    directive.lifecycle = _lifecycle(state, worker)
    directive.links.extend(_links(state, worker))
    directive.leave_step = (
        state.phase in (Phase.STOPPING, Phase.SUSPENDING) and not state.steps.open
    )
    if (seat := fleet.seats.by_name.get(worker.seat)) is not None:
        directive.seat.name = seat.name
        if seat.holder == worker.who:
            directive.seat.grant, directive.seat.hold = (
                seat.grant,
                not seat.asked or state.in_step(worker),
            )
    if worker.role is Role.POLICY:
        directive.checkpoint_step = due_checkpoint(state)
        if mesh is not None and state.fleet.in_mesh(worker):
            members = [message_of(worker_pb2.MeshMember, member) for member in mesh.members]
            directive.mesh.CopyFrom(message_of(worker_pb2.PolicyMesh, mesh, members=members))
    if worker.role is Role.ROLLOUT:
        for scorer in fleet.scorers():
            found = (scorer.scorer, scorer.worker_id, scorer.address)
            directive.scorers.add(name=found[0], worker_id=found[1], address=found[2])
    return directive


def _lifecycle(state: State, worker: Worker) -> worker_pb2.Lifecycle:
    if not worker.leaving:
        return worker_pb2.LIFECYCLE_RUNNING
    if state.phase is Phase.SUSPENDED:
        return worker_pb2.LIFECYCLE_STOPPED
    busy = _in_mesh(state, worker) if worker.role is Role.POLICY else bool(worker.held)
    # Only a scorer itself knows which requests it still answers.
    unknown = worker.role is Role.SCORER and worker.lifecycle is not Lifecycle.STOPPED
    return worker_pb2.LIFECYCLE_DRAINING if busy or unknown else worker_pb2.LIFECYCLE_STOPPED


def _in_mesh(state: State, worker: Worker) -> bool:
    """True if the mesh counts on the replica: as a member, or for the epoch after a broken one."""
    holds = worker.state_version == state.versions.version
    counts = state.fleet.whole_mesh is not None or state.steps.open is not None or holds
    return counts and state.fleet.in_mesh(worker)


def _links(state: State, worker: Worker) -> Iterator[worker_pb2.WeightsLink]:
    for link in state.fleet.links_of(worker.worker_id):
        sender = state.fleet.current(link.publisher, link.publisher_incarnation)
        receiver = state.fleet.current(link.receiver, link.receiver_incarnation)
        if sender is not None and receiver is not None:
            yield worker_pb2.WeightsLink(
                epoch=link.generation,
                publisher=message_of(worker_pb2.MeshMember, sender),
                receiver=message_of(worker_pb2.MeshMember, receiver),
                reload=link.reload,
                tree=link.tree,
                relayed=sender.role is Role.ROLLOUT,
            )


# ---- grounds ----------------------------------------------------------------------------------

_OWN = attrgetter("incarnation", "lifecycle", "drain")


class Grounds(NamedTuple):
    """Grounds of a worker's directive, as values that are quick to compare. With a large
    fleet most events leave most directives as they are. Equal grounds mean an equal directive, so
    only the others are built again. They have all that ``directive_of`` reads of the state."""

    firm: object  # Grounds of all fields but ``cancelled``
    leases: object
    """Grounds of ``cancelled``, which also depends on the leases that the worker's report names."""


def directive_grounds(state: State) -> Callable[[str, int], Grounds]:
    """For (worker id, incarnation): the grounds of its directive at this moment, its report left
    aside. The function is for use before the next event."""
    fleet, version = state.fleet, state.versions.version
    workers, links = fleet.workers, fleet.links
    common = (
        version,
        state.versions.stored,
        state.phase,
        state.paused,
        state.steps.open is None,
        tuple((w.scorer, w.worker_id, w.address) for w in fleet.scorers()),
    )
    of_members = (*common, fleet.mesh, due_checkpoint(state) if state.run_spec is not None else 0)

    def of(worker_id: str, incarnation: int) -> Grounds:
        worker = workers.get(worker_id)
        if worker is None:
            return Grounds((incarnation, common), ())
        seat = fleet.seats.by_name.get(worker.seat)
        taken = seat and (seat.holder, seat.grant, seat.asked)
        if worker.role is Role.POLICY:
            sent = fleet.links_of(worker_id)
            of_policy = incarnation, _OWN(worker), worker.state_version, of_members, sent, taken
            return Grounds(of_policy, ())
        # A lease that comes to a worker raises its lease_seq; one that goes is missing here.
        held = tuple(worker.held)
        received = links.get(worker_id)
        sent = fleet.links_of(worker_id) if fleet.sends_to(worker_id) else []
        # One that is asked to leave may go once it holds nothing.
        may_go = worker.leaving and not held
        firm = incarnation, _OWN(worker), may_go, common, received, sent, taken
        return Grounds(firm, (held, worker.lease_seq))

    return of
