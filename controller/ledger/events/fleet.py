"""Events of the fleet: workers, the mesh of the policy replicas, weights links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from controller.ledger.enums import DeathCause, Lifecycle, MeshEnd
from controller.ledger.events.event import (
    Event,
    Severity,
    Topic,
    counts_in_words,
    event,
    reason_in_words,
)
from controller.ledger.facts import MeshSpec, WorkerSpec
from paceline.ids import MeshEpoch, Version

_LEASES = frozenset({Topic.LEASE, Topic.ISOLATED})


@event
class WorkerRegistered(WorkerSpec, Event):
    """``state_version`` is as believed: -1 if the worker claims a state that it was found to have wrong."""

    spare: bool = False
    """Rollout: it leases nothing until it is put to work."""

    def text(self) -> str:
        return f"{self.worker_id} joined (pid {self.pid} on {self.host})"


@event
class WorkerDied(Event):
    worker_id: str
    incarnation: int
    how: DeathCause
    detail: str

    wakes = _LEASES

    @property
    def severity(self) -> Severity:
        return Severity.INFO if self.how is DeathCause.REPLACED else Severity.WARNING

    def text(self) -> str:
        return f"{self.worker_id} died ({reason_in_words(self.how, self.detail)})"


@event
class SpareSet(Event):
    """A rollout worker stands by from here on, or works."""

    worker_id: str
    incarnation: int
    spare: bool

    wakes = _LEASES

    def text(self) -> str:
        return f"{self.worker_id} {'stands by' if self.spare else 'works again'}"


@event
class WorkerChanged(Event):
    """A worker's report about itself: lifecycle, state it holds, weights it serves."""

    worker_id: str
    incarnation: int
    lifecycle: Lifecycle
    state_version: Version
    loaded_version: Version
    diverged_version: Version = Version(-1)
    """A version that it reported to hold and that was never committed; -1: none."""

    wakes = _LEASES
    # It concerns the worker's own directive alone, which is looked at with every report.
    directs = False

    @property
    def listed(self) -> bool:
        return self.lifecycle not in (Lifecycle.STARTING, Lifecycle.RUNNING)

    def text(self) -> str:
        return f"{self.worker_id} is {self.lifecycle}"


@event
class Drained(Event):
    """Someone asked a worker to leave."""

    request_id: str
    worker_id: str
    desired: Mapping[str, int] = field(default_factory=dict)
    """Desired counts that change with it; empty if the worker is to be replaced."""

    wakes = _LEASES

    def text(self) -> str:
        changed = f"; desired counts set to {counts_in_words(self.desired)}" if self.desired else ""
        return f"{self.worker_id} is asked to leave{changed}"


@event
class MeshBroken(Event):
    """The epoch is over for all its members."""

    epoch: MeshEpoch
    reason: MeshEnd
    detail: str = ""
    diverged: tuple[str, ...] = ()
    """Members whose weights differed from the majority's: they hold no state from here on."""
    broken_t: float = 0.0

    wakes = frozenset({Topic.PLAN, Topic.VOTE})

    @property
    def severity(self) -> Severity:
        return Severity.INFO if self.reason is MeshEnd.MEMBERSHIP else Severity.WARNING

    def text(self) -> str:
        return f"mesh epoch {self.epoch} is over ({reason_in_words(self.reason, self.detail)})"


@event
class MeshFormed(MeshSpec, Event):
    wakes = frozenset({Topic.PLAN})

    def text(self) -> str:
        return f"mesh epoch {self.epoch}: {', '.join(m.worker_id for m in self.members)}"


@event
class LinkAssigned(Event):
    """A weights link; replaces the receiver's earlier one."""

    epoch: int
    publisher: str
    publisher_incarnation: int
    receiver: str
    receiver_incarnation: int

    listed = False

    def text(self) -> str:
        return f"weights link {self.epoch} from {self.publisher} to {self.receiver}"
