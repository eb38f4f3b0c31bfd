"""Interface of the decisions to the ledger: the state, its callers, and the emission of events."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, get_type_hints

from controller.ledger.commands import Command, CommandRefused
from controller.ledger.events import Event
from controller.ledger.state.fleet import Worker
from controller.ledger.state.state import State
from paceline.errors import RefusalCode


class Decider(Protocol):
    """A decision reads ``state``, refuses before it emits anything, and changes nothing itself."""

    state: State

    def emit(self, event: Event) -> None:
        """Applies ``event`` at once and keeps it for the journal."""

    def caller(self, worker_id: str, incarnation: int) -> Worker:
        """The living worker of this incarnation; raises ``CommandRefused`` for any other."""
        worker = self.state.fleet.workers.get(worker_id)
        if worker is None:
            raise CommandRefused(RefusalCode.UNKNOWN, f"no worker {worker_id!r} is registered")
        if worker.incarnation != incarnation:
            raise CommandRefused(
                RefusalCode.FENCED, f"{worker_id} is another process now: register again"
            )
        if not worker.alive:
            raise CommandRefused(
                RefusalCode.FENCED,
                f"{worker_id} is {worker.lifecycle} for the ledger: register again",
            )
        return worker

    def settle_fleet(self, now: float) -> None:
        """Decides everything that may follow from a change of the fleet or of the run."""

    def mend_mesh(self, now: float) -> None:
        """Forms the epoch after a broken one, now."""

    def settle_evals(self, now: float) -> None:
        """Closes evaluation rounds that are complete, and the run if that was the last thing."""


_Decision = TypeVar("_Decision", bound=Callable[..., Any])
DECISIONS: dict[type[Command], Callable[..., Any]] = {}
"""The decision ``(d, command, now) -> reply`` for each class of commands."""


def decides(decision: _Decision) -> _Decision:
    """Registers ``decision`` for the class of commands that annotates its parameter ``c``."""
    DECISIONS[get_type_hints(decision)["c"]] = decision
    return decision
