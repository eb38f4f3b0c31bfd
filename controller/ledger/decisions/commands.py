"""Commands to the ledger: a decision with its arguments, to be executed at a time.

A decision is a function of the ledger, the time and its arguments that refuses, or emits events and
returns the reply. A decorator makes it a function that returns the command: ``command`` any one,
``of_worker`` one of a worker's process, ``by_request`` one of a person or an autoscaler.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from controller.ledger.enums import Phase
from controller.ledger.events import Event
from controller.ledger.state.fleet import Worker
from controller.ledger.state.state import State
from paceline.errors import RefusalCode

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
NEED_NO_RUN = ("start_run", "begin_term")


class CommandRefused(Exception):
    """The command is not allowed in this state; nothing has changed."""

    def __init__(self, code: RefusalCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class Decider(Protocol):
    """The ledger for decisions. They read ``state``, refuse before they emit anything, and change
    nothing themselves."""

    state: State

    def emit(self, event: Event) -> None:
        """Applies ``event`` at once and keeps it for the journal."""

    def settle_fleet(self, now: float) -> None:
        """Decides everything that may follow from a change of the fleet or of the run."""

    def settle_evals(self, now: float) -> None:
        """Closes evaluation rounds that are complete, and the run if that was the last thing."""


@dataclass(slots=True)  # Frozen, it would take longer to make
class Command(Generic[R_co]):
    decide: Callable[..., R_co]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def execute(self, d: Decider, now: float) -> R_co:
        """The reply, which may leave only once the events are durable. ``now``: Unix seconds.
        Raises CommandRefused, with nothing changed, if the command is not allowed."""
        if d.state.phase is Phase.NONE and self.name not in NEED_NO_RUN:
            raise CommandRefused(RefusalCode.UNKNOWN, "no run has been started")
        return self.decide(d, now, *self.args, **self.kwargs)

    @property
    def name(self) -> str:
        return self.decide.__name__.removeprefix("_")

    def __repr__(self) -> str:
        return f"{self.name}{self.args}"


def command(decide: Callable[Concatenate[Decider, float, P], R]) -> Callable[P, Command[R]]:
    def made(*args: P.args, **kwargs: P.kwargs) -> Command[R]:
        return Command(decide, args, kwargs)

    return made


def of_worker(
    decide: Callable[Concatenate[Decider, float, Worker, P], R],
) -> Callable[Concatenate[str, int, P], Command[R]]:
    """The command's first arguments are a worker id and an incarnation. It is refused for any
    process but the current one."""

    def checked(
        d: Decider, now: float, worker: str, incarnation: int, /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        return decide(d, now, caller(d.state, worker, incarnation), *args, **kwargs)

    checked.__name__ = decide.__name__
    return command(checked)


def caller(s: State, worker_id: str, incarnation: int) -> Worker:
    """The living worker of this incarnation; raises ``CommandRefused`` for any other."""
    worker = s.fleet.workers.get(worker_id)
    if worker is None:
        raise CommandRefused(RefusalCode.UNKNOWN, f"no worker {worker_id!r} is registered")
    if worker.incarnation != incarnation:
        raise CommandRefused(
            RefusalCode.FENCED, f"{worker_id} is another process now: register again"
        )
    if not worker.alive:
        raise CommandRefused(
            RefusalCode.FENCED, f"{worker_id} is {worker.lifecycle} for the ledger: register again"
        )
    return worker


def by_request(
    decide: Callable[Concatenate[Decider, float, str, P], None], *, after_end: bool = False
) -> Callable[Concatenate[str, P], Command[str]]:
    """The command's first argument is a request id, its reply the effect. A repeated request gets
    its first reply and decides nothing. What may follow from it is decided with it."""

    def answer(
        d: Decider, now: float, request_id: str, /, *args: P.args, **kwargs: P.kwargs
    ) -> str:
        s = d.state
        if request_id not in s.requests:
            if s.ended and not after_end:
                raise CommandRefused(RefusalCode.STOPPED, f"the run has {s.phase}")
            decide(d, now, request_id, *args, **kwargs)
            d.settle_fleet(now)
        return s.requests[request_id]

    answer.__name__ = decide.__name__
    return command(answer)
