"""Events of the seats that workers hold in turn."""

from controller.ledger.enums import Role
from controller.ledger.events.event import LEASES, Event, Topic, event
from controller.ledger.state.state import State
from paceline.observe.vocabulary import Severity


def side_of(role: Role) -> str:
    return "training" if role is Role.POLICY else "generation"


@event(severity=Severity.ROUTINE)
class TurnChanged(Event):
    """The other side is to hold the seats: their holders are asked to park."""

    role: Role
    why: str
    t: float

    def apply(self, s: State) -> None:
        seats = s.fleet.seats
        seats.turn, seats.why = self.role, self.why
        for seat in seats.by_name.values():
            if seat.holder and s.fleet.workers[seat.holder[0]].role.side is not self.role:
                seat.ask(self.t, self.why)

    def text(self) -> str:
        return f"the devices go to {side_of(self.role)}: {self.why}"


@event()
class SeatLent(Event):
    """The seat goes to the other side, for as long as it is not lent again."""

    seat: str
    role: Role
    why: str
    t: float

    def apply(self, s: State) -> None:
        seat = s.fleet.seats.by_name[self.seat]
        seat.role, seat.since, seat.why = self.role, self.t, self.why
        if seat.holder and s.fleet.workers[seat.holder[0]].role is not self.role:
            seat.ask(self.t, self.why)

    def text(self) -> str:
        return f"{self.seat} is lent to {side_of(self.role)}: {self.why}"


@event(words="pairs that train: {0.seats} ({0.why})")
class TrainingSeatsSet(Event):
    """So many seats are to be lent to training."""

    request_id: str
    seats: int
    why: str

    def apply(self, s: State) -> None:
        s.fleet.seats.training, s.fleet.seats.why = self.seats, self.why
        s.remember(self.request_id, f"{self.seats} of {len(s.fleet.seats.by_name)} pairs train")


@event(listed=False)
class SeatAsked(Event):
    """One holder is asked to park: the journal has lost what became of its grant, or its side has
    the seat no more."""

    seat: str
    why: str
    t: float

    def apply(self, s: State) -> None:
        s.fleet.seats.by_name[self.seat].ask(self.t, self.why)


@event(listed=False, wakes=LEASES | {Topic.PLAN})
class SeatGranted(Event):
    """From here on this worker may use the devices: it alone, or one side's workers together."""

    seat: str
    worker_id: str
    incarnation: int
    grant: int
    why: str
    t: float

    def apply(self, s: State) -> None:
        seats = s.fleet.seats
        seats.grants = self.grant
        holder = self.worker_id, self.incarnation
        seats.by_name[self.seat].give(holder, self.grant, self.t, self.why)


@event(listed=False)
class SeatsCertain(Event):
    """Whoever may use a seat is registered: a worker whose registration was lost has come again, or
    its lease is over."""

    def apply(self, s: State) -> None:
        s.fleet.seats.doubted = False


@event(listed=False)
class SeatReturned(Event):
    """The holder has parked, or a stray: it uses none of the devices any more. After a failover all
    but the holder may be strays."""

    seat: str
    worker_id: str
    incarnation: int
    grant: int
    t: float

    def apply(self, s: State) -> None:
        seat = s.fleet.seats.by_name[self.seat]
        if (who := (self.worker_id, self.incarnation)) in seat.strays:
            seat.clear(who)
        else:
            # Of a loan the reason stays: it is shown for as long as the seat is lent.
            seat.free(self.t, seat.why if seat.role else f"{self.worker_id} has parked")
