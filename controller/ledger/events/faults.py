"""Events about faults: of processes, causes found later, suspected hosts."""

from controller.ledger.events.event import Event, event, reason_in_words
from controller.ledger.state.state import State
from paceline.observe.faults import Fault
from paceline.observe.vocabulary import NO_FAULT, FaultCause, Severity


@event
class ProcessFault(Event):
    """A launcher saw a fault of a controller or of Redis, or of a worker that is still alive."""

    request_id: str
    name: str
    host: str
    pid: int
    cause: FaultCause
    detail: str
    t: float

    directs = False

    @property
    def severity(self) -> Severity:
        return Severity.INFO if self.cause in NO_FAULT else Severity.WARNING

    def apply(self, s: State) -> None:
        if self.cause not in NO_FAULT:
            s.faults.add(Fault(self.t, self.name, self.host, self.pid, self.cause))
        s.remember(self.request_id, self.text())

    def text(self) -> str:
        words = reason_in_words(self.cause, self.detail)
        return f"{self.name} (pid {self.pid} on {self.host}): {words}"


@event
class FaultExplained(Event):
    """Later evidence says what an incarnation of a worker has died of."""

    worker_id: str
    incarnation: int
    cause: FaultCause
    detail: str

    directs = False

    def apply(self, s: State) -> None:
        s.faults.explain(self.worker_id, self.incarnation, self.cause)
        worker = s.fleet.workers.get(self.worker_id)
        if worker is not None and worker.incarnation == self.incarnation:
            worker.death = self.cause

    def text(self) -> str:
        reason = reason_in_words(self.cause, self.detail)
        return f"the death of {self.worker_id} is explained ({reason})"


@event
class HostBlamed(Event):
    """Several processes of one host have failed: the host is suspected, not they."""

    host: str
    faults: int
    names: tuple[str, ...]
    window_s: float
    t: float

    directs = False
    severity = Severity.WARNING

    def apply(self, s: State) -> None:
        s.faults.blamed[self.host] = self.t

    def text(self) -> str:
        return (
            f"host {self.host} is suspected: {self.faults} of its processes' faults within "
            f"{self.window_s / 60:.0f} min ({', '.join(self.names)})"
        )
