"""Seats: devices that a policy replica and a rollout worker of one host hold in turn.

    free ── SeatGranted ──► held ── TurnChanged, SeatLent ──► asked for ── SeatReturned ──► free
      ▲                       └────────── its holder leaves the fleet ──────────┘            │
      └────────────────────────────────────────────────────────────────────────────────────┘

- A seat has one holder at most, which lives. Every grant has a number, higher than all before it.
- What is asked for stays so until it is returned: a worker that has parked under a grant never uses
  the devices under it again, even if the other side's turn is over before its report arrives.
- With turns all seats of a run change together: ``turn`` is the role that gets what comes free.
- A scorer at the same devices has a seat beside that of the pair, NAME:SCORER. It holds it with
  generation's turn: seats of one device are held by one side.
- With lending each seat has a role of its own, and ``training`` of them are to be training's. If
  only one seat is left, it is held in turn.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from controller.ledger.enums import Role

Holder = tuple[str, int]  # (worker id, incarnation)


@dataclass(slots=True)
class Seat:
    name: str
    holder: Holder | None = None
    grant: int = 0  # Number of its newest grant; 0: it was never granted
    asked: bool = False  # The holder is asked to return it
    strays: tuple[Holder, ...] = ()
    """Others than the holder. Each may use the devices under a grant that the journal has lost:
    nobody else gets them before it has told this term's leader that it has parked."""
    role: Role | None = None  # Lending: the side that it is lent to
    since: float = 0.0  # Time of the newest of these changes. Unix seconds; 0: it is not known.
    why: str = ""  # Reason of that change

    @property
    def device(self) -> str:
        """Name of the seat of the pair that has the same devices."""
        return self.name.partition(":")[0]

    def give(self, holder: Holder, grant: int, t: float, why: str) -> None:
        self.holder, self.grant, self.asked, self.strays = holder, grant, False, ()
        self.since, self.why = t, why

    def ask(self, t: float, why: str) -> None:
        self.asked, self.since, self.why = True, t, why

    def free(self, t: float, why: str) -> None:
        self.holder, self.asked = None, False
        self.since, self.why = t, why

    def clear(self, stray: Holder) -> None:
        """It does not use the devices."""
        self.strays = tuple(other for other in self.strays if other != stray)


@dataclass(slots=True)
class Seats:
    by_name: dict[str, Seat] = field(default_factory=dict)
    """Seats that a living worker has registered with."""
    turn: Role = Role.POLICY
    why: str = "the run starts"  # Reason of the newest change of ``turn`` or of ``training``
    grants: int = 0  # The newest grant of all seats
    training: int = 0  # Lending: seats that are to train. 0: all take turns.
    doubted: bool = False
    """The journal may have lost registrations: somebody who is unknown may use any device."""

    @property
    def to_train(self) -> int:
        """Lending: seats that are to train, of those there are. 0: all take turns, as does the last
        one that is left."""
        return min(self.training, len(self.by_name) - 1) if len(self.by_name) > 1 else 0

    def role_of(self, seat: Seat) -> Role:
        """The side that the seat goes to when it is free."""
        return (seat.role if self.to_train else None) or self.turn

    def lend(self, training: int) -> None:
        """So many seats are to train; 0: from here on all take turns."""
        self.training = training
        for seat in self.by_name.values() if not training else ():
            seat.role = None

    def join(self, name: str) -> None:
        """A worker with this seat has come; "": one with devices of its own."""
        if name:
            self.by_name.setdefault(name, Seat(name))

    def leave(self, name: str, holder: Holder, others: Collection[str], t: float) -> None:
        """A worker with this seat has gone. ``others``: seats of those that live."""
        seat = self.by_name.get(name)
        if seat is None:
            return
        if seat.holder == holder:
            seat.free(t, f"{holder[0]} has left")
        seat.clear(holder)
        if name not in others:
            del self.by_name[name]
