"""Events of the fleet: workers, the mesh of the policy replicas, weights links, faults."""

from collections.abc import Mapping
from dataclasses import field, replace

from controller.ledger.enums import Lifecycle, Role
from controller.ledger.events.event import (
    LEASES,
    PLANS,
    Event,
    Topic,
    counts_in_words,
    event,
    reason_in_words,
)
from controller.ledger.specs import LinkSpec, MeshSpec, WorkerSpec, values
from controller.ledger.state.fleet import Failures, Mesh, Worker
from controller.ledger.state.state import State
from paceline.errors import plural
from paceline.ids import MeshEpoch, Version, stored_version
from paceline.observe.vocabulary import (
    ATTRIBUTED,
    NO_FAULT,
    OF_HOST,
    DeathCause,
    FaultCause,
    MeshEnd,
    Severity,
)


@event(words="{0.worker_id} joined (pid {0.pid} on {0.host})")
class WorkerRegistered(WorkerSpec, Event):
    """``state_version`` is -1 if the worker claims a state that it was found to have wrong."""

    spare: bool = False  # Rollout: it leases nothing until it is put to work

    def apply(self, s: State) -> None:
        s.fleet.register(Worker(**values(WorkerSpec, self), spare=self.spare))


@event(directs=False, severity=Severity.WARNING)
class OriginsDiffer(Event):
    """A worker was started with other code or models than another one that does the same."""

    worker_id: str
    other: str
    settings: tuple[str, ...]

    def apply(self, s: State) -> None:
        """The registration's own event has changed the state."""

    def text(self) -> str:
        return (
            f"{self.worker_id} has other files than {self.other} behind "
            f"{', '.join(self.settings)}: give both the same ones, and restart the wrong one"
        )


@event(wakes=LEASES, warns=lambda e: e.how is not DeathCause.REPLACED)
class WorkerDied(Event):
    worker_id: str
    incarnation: int
    how: DeathCause
    detail: str
    cause: FaultCause = FaultCause.UNATTRIBUTED
    host: str = ""
    silent_s: float = 0.0  # Since it was last heard of
    t: float = 0.0
    of_task: bool = False  # It died of the task or group that it was isolated with

    def apply(self, s: State) -> None:
        worker = s.fleet.workers[self.worker_id]
        s.fleet.leave(worker, Lifecycle.DEAD, self.t)
        worker.death, worker.silent_s, worker.of_task = self.cause, self.silent_s, self.of_task
        if self.cause in OF_HOST and not self.of_task:
            s.fleet.hosts.blame(worker.host, worker.process, self.t)

    def text(self) -> str:
        words = reason_in_words(self.how, self.detail)
        if self.cause in ATTRIBUTED and str(self.cause) != str(self.how):
            words = f"{reason_in_words(self.cause)}; {words}"
        return f"{self.worker_id} died ({words})"


@event(wakes=LEASES)
class SpareSet(Event):
    """A rollout worker stands by from here on, or works."""

    worker_id: str
    incarnation: int
    spare: bool

    def apply(self, s: State) -> None:
        s.fleet.workers[self.worker_id].spare = self.spare

    def text(self) -> str:
        return f"{self.worker_id} {'stands by' if self.spare else 'works again'}"


# It concerns the worker's own directive alone, which is looked at with every report.
@event(
    wakes=LEASES,
    directs=False,
    listed=lambda e: e.lifecycle not in (Lifecycle.STARTING, Lifecycle.RUNNING),
    words="{0.worker_id} is {0.lifecycle}",
)
class WorkerChanged(Event):
    """A worker's report about itself: lifecycle, state it holds, weights it serves."""

    worker_id: str
    incarnation: int
    lifecycle: Lifecycle
    state_version: Version
    loaded_version: Version
    diverged_version: Version = Version(-1)
    """A version that it reported to hold and that was never committed; -1: none."""

    def apply(self, s: State) -> None:
        worker = s.fleet.workers[self.worker_id]
        worker.state_version = self.state_version
        if self.loaded_version > worker.loaded_version:
            worker.load_trouble = ""
        worker.loaded_version = self.loaded_version
        worker.diverged_version = max(worker.diverged_version, self.diverged_version)
        if self.lifecycle is Lifecycle.STOPPED:
            s.fleet.leave(worker, self.lifecycle)
        else:
            worker.lifecycle = self.lifecycle


@event(directs=False, severity=Severity.WARNING)
class ParityFailed(Event):
    """After a swap the parameters of an engine differed from the weights: it serves nothing until
    it has loaded them again."""

    worker_id: str
    incarnation: int
    failures: int  # Failures of this incarnation so far. One report may stand for several.
    detail: str

    def apply(self, s: State) -> None:
        worker = s.fleet.workers[self.worker_id]
        s.fleet.parity_failures += self.failures - worker.parity_failures
        worker.parity_failures = self.failures
        worker.loaded_version = Version(-1)

    def text(self) -> str:
        words = reason_in_words("parity_failure", self.detail)
        return f"{self.worker_id} serves nothing until it has loaded the weights again ({words})"


@event(
    directs=False,
    severity=Severity.WARNING,
    words="{0.worker_id} tries again to load weights ({0.detail})",
)
class WeightsNotLoaded(Event):
    """Weights came to a rollout worker, and it could not stage or load them. It gets them again
    over another link, and ends if that fails several times in a row."""

    worker_id: str
    incarnation: int
    failures: int  # Failures of this incarnation so far. One report may stand for several.
    detail: str

    def apply(self, s: State) -> None:
        worker = s.fleet.workers[self.worker_id]
        worker.load_failures = self.failures
        worker.load_trouble = self.detail


@event(wakes=LEASES)
class Drained(Event):
    request_id: str
    worker_id: str
    desired: Mapping[str, int] = field(default_factory=dict)
    """Desired counts that change with it; empty if the worker is to be replaced."""

    def apply(self, s: State) -> None:
        s.fleet.workers[self.worker_id].drain = True
        s.desired.update(self.desired)
        reply = f"{self.worker_id} finishes what it holds and leaves"
        changed = f"; desired counts are now {counts_in_words(s.desired)}" if self.desired else ""
        s.remember(self.request_id, reply + changed)

    def text(self) -> str:
        changed = f"; desired counts set to {counts_in_words(self.desired)}" if self.desired else ""
        return f"{self.worker_id} is asked to leave{changed}"


@event(wakes=PLANS, warns=lambda e: e.reason is not MeshEnd.MEMBERSHIP)
class MeshBroken(Event):
    """The epoch is over for all its members."""

    epoch: MeshEpoch
    reason: MeshEnd
    detail: str = ""
    diverged: tuple[str, ...] = ()
    """Members whose weights differed from the majority's: they hold no state from here on."""
    broken_t: float = 0.0

    def apply(self, s: State) -> None:
        fleet = s.fleet
        assert fleet.mesh is not None
        if self.reason is MeshEnd.PEER_ERROR:
            for worker, failures in fleet.failures_after(self.broken_t):
                worker.failures = failures
        fleet.mesh = replace(fleet.mesh, broken=True)
        fleet.rebuild_due = fleet.rebuild_due or self.reason is not MeshEnd.MEMBERSHIP
        if self.diverged and s.steps.open is not None:
            votes = s.steps.open.votes
            believed = next(v.digest for w, v in votes.items() if w not in self.diverged)
            s.agree(s.steps.open.version, believed)
        for worker_id in self.diverged:
            worker = fleet.workers[worker_id]
            worker.diverged_version = max(worker.diverged_version, worker.state_version)
            worker.state_version = Version(-1)
            if self.broken_t:  # bits of its memory have changed
                fault = f"{worker.process} in epoch {self.epoch}"
                fleet.hosts.blame(worker.host, fault, self.broken_t)

    def text(self) -> str:
        return f"mesh epoch {self.epoch} is over ({reason_in_words(self.reason, self.detail)})"


@event(wakes=frozenset({Topic.PLAN}))
class MeshFormed(MeshSpec, Event):
    def apply(self, s: State) -> None:
        fleet = s.fleet
        fleet.mesh_rebuilds += fleet.rebuild_due
        fleet.rebuild_due = False
        fleet.mesh_epoch = self.epoch
        before = fleet.mesh
        restored = before.state_version if before is not None and before.restore else None
        if self.restore and restored != self.state_version:
            # All members restore: earlier faults of the network say nothing about now.
            for worker in fleet.workers.values():
                worker.failures = Failures()
        fleet.mesh = Mesh(**values(MeshSpec, self))

    def text(self) -> str:
        return f"mesh epoch {self.epoch}: {', '.join(self.names)}"


@event(severity=Severity.WARNING)
class WeightsWithdrawn(Event):
    """``worker_id`` was outvoted about the weights of ``version``, which it has published."""

    worker_id: str
    version: Version
    receivers: tuple[str, ...]
    """Rollout workers that may have loaded them: they count as loaded again with a newer version.
    """

    def apply(self, s: State) -> None:
        for worker_id in self.receivers:
            worker = s.fleet.workers[worker_id]
            worker.withdrawn_version = self.version
            if worker.loaded_version == self.version:
                worker.loaded_version = Version(-1)
        if stored_version(s.versions.stored) == self.version:
            s.versions.stored = ""

    def text(self) -> str:
        return (
            f"weights of version {self.version} from {self.worker_id} are withdrawn: the other "
            f"replicas' weights differ ({plural(len(self.receivers), 'receiver')})"
        )


@event(listed=lambda e: not e.readable, warns=lambda e: not e.readable)
class WeightsStored(Event):
    """Weights are complete in the store of ``weights.url``, or cannot be read from there."""

    name: str
    worker_id: str  # That wrote them, or could not read them
    readable: bool = True

    def apply(self, s: State) -> None:
        s.versions.stored = self.name if self.readable else ""
        if not self.readable:
            same = stored_version(s.versions.unreadable) == stored_version(self.name)
            before = s.versions.unreadable_by if same else ()
            s.versions.unreadable, s.versions.unreadable_by = self.name, (*before, self.worker_id)

    def text(self) -> str:
        what = "are in the store" if self.readable else "cannot be read, and are stored again"
        return f"weights {self.name} {what} ({self.worker_id})"


@event(listed=False)
class LinkAssigned(LinkSpec, Event):
    def apply(self, s: State) -> None:
        if self.tree > s.fleet.tree:
            s.fleet.tree, s.fleet.tree_planted = self.tree, (s.term, s.versions.version)
            for worker in s.fleet.living(Role.ROLLOUT):
                worker.relay_faults = 0
        if self.blames in s.fleet.workers:
            s.fleet.workers[self.blames].relay_faults += 1
        s.fleet.assign(self)


@event(directs=False, warns=lambda e: e.cause not in NO_FAULT)
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

    def apply(self, s: State) -> None:
        worker = s.fleet.workers.get(self.name)
        if worker is not None and worker.pid == self.pid and self.cause is FaultCause.STOPPED:
            worker.stopped_t = self.t
        if self.over and self.cause in OF_HOST:
            s.fleet.hosts.blame(self.host, self.request_id, self.t)
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
    t: float = 0.0  # 0: it is of an earlier release

    def apply(self, s: State) -> None:
        worker = s.fleet.workers.get(self.worker_id)
        if worker is not None and worker.incarnation == self.incarnation:
            worker.death = self.cause
            fault = worker.host, worker.process
            if self.cause not in OF_HOST or worker.of_task:
                s.fleet.hosts.excuse(*fault)
            elif self.t:
                s.fleet.hosts.blame(*fault, self.t)

    def text(self) -> str:
        reason = reason_in_words(self.cause, self.detail)
        return f"the death of {self.worker_id} is explained ({reason})"
