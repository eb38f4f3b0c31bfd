"""Grounds of a directive: what a worker's directive depends on, as a value that is quick to
compare. With a large fleet most events leave most directives as they are. Equal grounds mean an
equal directive, so only the others are built again. Whatever ``views.directive`` reads of the state
has to be among the grounds: that which all workers share is taken once, in
``directive_grounds``."""

from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

from controller.ledger.enums import Role
from controller.ledger.state.state import State
from controller.ledger.views.views import due_checkpoint

_OWN = attrgetter("incarnation", "lifecycle", "drain")


class Grounds(NamedTuple):
    """Both parts compare by value."""

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
        if worker.role is Role.POLICY:
            sent = fleet.links_of(worker_id)
            of_policy = incarnation, _OWN(worker), worker.state_version, of_members, sent
            return Grounds(of_policy, ())
        # A lease that comes to a worker raises its lease_seq; one that goes is missing here.
        held = tuple(worker.held)
        received = links.get(worker_id)
        sent = fleet.links_of(worker_id) if fleet.sends_to(worker_id) else []
        # One that is asked to leave may go once it holds nothing.
        may_go = worker.leaving and not held
        firm = incarnation, _OWN(worker), may_go, common, received, sent
        return Grounds(firm, (held, worker.lease_seq))

    return of
