"""Events of the run as a whole: its start and end, its leaders, requests of people."""

from __future__ import annotations

from collections.abc import Mapping

from controller.ledger.events.event import (
    Event,
    Severity,
    Topic,
    counts_in_words,
    event,
)
from controller.ledger.facts import RunSpec
from paceline.ids import Step

_ALL = frozenset(Topic)
_LEASES = frozenset({Topic.LEASE, Topic.ISOLATED})


@event
class RunStarted(Event):
    facts: RunSpec
    t: float

    wakes = _LEASES

    def text(self) -> str:
        return "run started"


@event
class TermBegun(Event):
    """``controller_id`` leads from here on; nothing of an earlier term follows."""

    term: int
    controller_id: str
    t: float
    failover: bool = False
    """It took over a fleet at work: not the first leader, nor that of a run that is resumed."""

    @property
    def severity(self) -> Severity:
        return Severity.WARNING if self.failover else Severity.INFO

    def text(self) -> str:
        return f"{self.controller_id} leads (term {self.term})"


@event
class Scaled(Event):
    request_id: str
    desired: Mapping[str, int]

    def text(self) -> str:
        return f"desired counts set to {counts_in_words(self.desired)}"


@event
class BoundsSet(Event):
    """Limits of the desired counts from here on; see RunSpec.bounds."""

    bounds: Mapping[str, int]

    def text(self) -> str:
        return f"limits of the desired counts set to {counts_in_words(self.bounds) or 'none'}"


@event
class Paused(Event):
    request_id: str
    paused: bool

    wakes = _LEASES

    def text(self) -> str:
        return "run paused" if self.paused else "run resumed"


@event
class CheckpointRequested(Event):
    """A checkpoint of ``step``, the next one that the replicas can still write, was requested."""

    request_id: str
    step: Step

    def text(self) -> str:
        return f"checkpoint of step {self.step} requested"


@event
class StopRequested(Event):
    request_id: str
    reason: str

    wakes = _ALL

    def text(self) -> str:
        return f"stop requested: {self.reason}" if self.reason else "stop requested"


@event
class RunFinished(Event):
    reason: str
    """completed, or why it was stopped early."""
    t: float

    wakes = _ALL

    def text(self) -> str:
        return f"run finished ({self.reason})"


@event
class RunFailed(Event):
    request_id: str
    reason: str
    t: float

    wakes = _ALL
    severity = Severity.ERROR

    def text(self) -> str:
        return f"run failed: {self.reason}"
