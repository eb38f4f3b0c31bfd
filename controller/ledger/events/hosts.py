"""Events of hosts: blocked, let in again, or kept although they are to blame."""

from controller.ledger.events.event import LEASES, PLANS, Event, event
from controller.ledger.state.hosts import Host
from controller.ledger.state.state import State
from paceline.observe.vocabulary import Severity


@event(wakes=LEASES | PLANS, severity=Severity.WARNING)
class HostBlocked(Event):
    """Workers of the host get no new work until it is let in again."""

    request_id: str  # Empty: the leader blocks it for its faults
    host: str
    why: str

    def apply(self, s: State) -> None:
        s.fleet.hosts.block(self.host, self.why, by_leader=not self.request_id)
        if self.request_id:
            s.remember(self.request_id, self.text())

    def text(self) -> str:
        again = f"let it in again with: paceline hosts allow {self.host}"
        return f"host {self.host} gets no new work ({self.why}); {again}"


@event(wakes=LEASES | PLANS)
class HostAllowed(Event):
    """The host is let in again. If a person does it, its faults so far do not count any more."""

    request_id: str  # Empty: the leader, because faults were not the host's
    host: str

    def apply(self, s: State) -> None:
        if not self.request_id:
            s.fleet.hosts.unblock(self.host)
            return
        s.fleet.hosts.by_name.pop(self.host, None)
        s.remember(self.request_id, self.text())

    def text(self) -> str:
        return f"host {self.host} gets work again"


@event(directs=False, severity=Severity.WARNING)
class HostKept(Event):
    """The host would be blocked for its faults, and the run needs it."""

    host: str
    why: str

    def apply(self, s: State) -> None:
        s.fleet.hosts.by_name.setdefault(self.host, Host()).kept = True

    def text(self) -> str:
        return f"host {self.host} is to blame for {self.why}"
