"""Events about faults: of processes, and causes found later."""

from controller.ledger.events.event import Event, event, reason_in_words
from controller.ledger.state.state import State
from paceline.observe.vocabulary import NO_FAULT, FaultCause, Severity


@event(directs=False)
class ProcessFault(Event):
    """A launcher saw a fault of a controller or of Redis, or of a worker that is still alive."""

    request_id: str
    name: str
    host: str
    pid: int
    cause: FaultCause
    detail: str
    t: float
    over: bool = False  # The process has ended

    @property
    def severity(self) -> Severity:
        return Severity.INFO if self.cause in NO_FAULT else Severity.WARNING

    def apply(self, s: State) -> None:
        worker = s.fleet.workers.get(self.name)
        if worker is not None and worker.pid == self.pid and self.cause is FaultCause.STOPPED:
            worker.stopped_t = self.t
        s.remember(self.request_id, self.text())

    def text(self) -> str:
        words = reason_in_words(self.cause, self.detail)
        return f"{self.name} (pid {self.pid} on {self.host}): {words}"


@event(directs=False)
class FaultExplained(Event):
    """Later evidence says what an incarnation of a worker has died of."""

    worker_id: str
    incarnation: int
    cause: FaultCause
    detail: str

    def apply(self, s: State) -> None:
        worker = s.fleet.workers.get(self.worker_id)
        if worker is not None and worker.incarnation == self.incarnation:
            worker.death = self.cause

    def text(self) -> str:
        reason = reason_in_words(self.cause, self.detail)
        return f"the death of {self.worker_id} is explained ({reason})"
