"""Seats of a simulated run: who holds them by the journal, checked without the ledger's code, and
who uses their devices."""

from collections.abc import Iterable

from controller.ledger import events as ev


def _side(worker_id: str) -> str:
    return "policy" if worker_id.startswith("policy") else "rollout"


class SeatOracle:
    def __init__(self) -> None:
        self.seats: dict[str, tuple[str, int]] = {}
        """Seat and incarnation of each living worker that has one."""
        self.holders: dict[str, tuple[str, int, int]] = {}
        """Worker, incarnation and grant, by seat."""
        self.asked: set[str] = set()
        self.terms = 0
        self.doubted = False
        """Workers may have registered, and hold seats, in a part of the journal that is lost."""
        self.strays: set[str] = set()
        """Who may use a seat under a grant that is lost."""
        self.newest = 0
        self.turns = 0

    def take(self, event: ev.Event, open_step: ev.StepOpened | None, members: Iterable[str]) -> str:
        """What is wrong with the event; empty if nothing is. ``members``: of the newest epoch."""
        match event:
            case ev.WorkerRegistered() if event.seat:
                self.seats[event.worker_id] = event.seat, event.incarnation
                if self.doubted:
                    self.strays.add(event.worker_id)
            case ev.WorkerDied():
                self._gone(event.worker_id)
            case ev.WorkerChanged() if event.lifecycle == "stopped":
                self._gone(event.worker_id)
            case ev.TurnChanged():
                self.turns += 1
                role = str(event.role)
                self.asked |= {s for s, (w, *_) in self.holders.items() if _side(w) != role}
                return f"the turn changes during step {open_step.step}" if open_step else ""
            case ev.SeatLent():
                holder = self.holders.get(event.seat)
                if holder is not None and not holder[0].startswith(str(event.role)):
                    self.asked.add(event.seat)
            case ev.TermBegun():
                self.terms, self.doubted = self.terms + 1, self.terms > 0
                self.strays = {worker for worker in self.seats if not self._holds(worker)}
            case ev.SeatsCertain():
                self.doubted = False
            case ev.SeatAsked():
                self.asked.add(event.seat)
            case ev.SeatGranted():
                return self._granted(event)
            case ev.SeatReturned():
                return self._returned(event)
            case ev.TasksLeased() if not self._seated(event.worker_id):
                return f"{event.worker_id} leases tasks and does not hold its seat"
            case ev.StepOpened():
                away = [w for w in members if not self._seated(w)]
                return f"step {event.step} opens, and {away} do not hold their seats" * bool(away)
            case ev.MeshFormed() if open_step is None:
                away = [m.worker_id for m in event.members if not self._seated(m.worker_id)]
                return f"epoch {event.epoch} is formed with {away}, who are parked" * bool(away)
        return ""

    def _holds(self, worker_id: str) -> bool:
        seat, incarnation = self.seats.get(worker_id, ("", 0))
        return self.holders.get(seat, ())[:2] == (worker_id, incarnation)

    def _seated(self, worker_id: str) -> bool:
        seat = self.seats.get(worker_id, ("", 0))[0]
        return not seat or (self._holds(worker_id) and seat not in self.asked)

    def _gone(self, worker_id: str) -> None:
        seat, incarnation = self.seats.pop(worker_id, ("", 0))
        self.strays.discard(worker_id)
        if self.holders.get(seat, ())[:2] == (worker_id, incarnation):
            del self.holders[seat]
            self.asked.discard(seat)

    def _granted(self, e: ev.SeatGranted) -> str:
        if self.seats.get(e.worker_id) != (e.seat, e.incarnation):
            return f"{e.seat} is given to {e.worker_id}, who is dead or has another seat"
        if e.seat in self.holders:
            return f"{e.seat} of {self.holders[e.seat]} is given to {e.worker_id}"
        if self.doubted:
            return f"{e.seat} is given to {e.worker_id}, and somebody unknown may use its devices"
        self.strays.discard(e.worker_id)
        for name in (*self.strays, *(worker for worker, *_ in self.holders.values())):
            seat, device = self.seats[name][0], e.seat.partition(":")[0]
            strange = seat.partition(":")[0] == device and _side(name) != _side(e.worker_id)
            if strange or seat == e.seat:
                return f"{e.seat} is given to {e.worker_id} while {name} may use its devices"
        if e.grant <= self.newest:
            return f"grant {e.grant} follows {self.newest}"
        self.newest = e.grant
        self.holders[e.seat] = e.worker_id, e.incarnation, e.grant
        return ""

    def _returned(self, e: ev.SeatReturned) -> str:
        if e.worker_id in self.strays and self.seats[e.worker_id] == (e.seat, e.incarnation):
            self.strays.remove(e.worker_id)
            return ""
        if self.holders.get(e.seat) != (e.worker_id, e.incarnation, e.grant):
            return f"{e.seat} of {self.holders.get(e.seat)} is returned by {e}"
        if e.seat not in self.asked:
            return f"{e.seat} is returned, and nobody has asked for it"
        del self.holders[e.seat]
        self.asked.discard(e.seat)
        return ""
