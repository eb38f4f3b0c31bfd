"""The fleet: workers, the gradient mesh of the policy replicas, and the weights links.

- One incarnation of a worker id is current; every earlier one is fenced for good.
- A mesh epoch's members never change: a loss or a join is a new epoch. Epochs only rise.
- A link has two ends and a generation of its own, so a broken receiver concerns no other worker.
- What is asked of every report or lease is looked up in an index (``Fleet.living``,
  ``Fleet.links_of``): no question about one worker goes through all of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from controller.ledger.codec import TRANSIENT
from controller.ledger.enums import Lifecycle, Role
from controller.ledger.specs import LeasedTask, LinkSpec, MeshSpec
from controller.ledger.state.hosts import Hosts
from controller.ledger.state.seats import Seats
from paceline.ids import MeshEpoch, TaskId, Version
from paceline.observe.vocabulary import FaultCause
from paceline.worker_pools import pool_of

_RETIRED_KEPT = 64
_GONE_KEPT = 256
TRIES = 3
"""Epochs in a row of a replica and the same source that may fail, for at least as long as below,
before one of the two is left out: some part of the network between them is broken."""
JOINER_S = 30.0
"""A refused connection fails in milliseconds: a short fault of the network is over by then."""
HOLDER_S = 300.0
"""Time before one of two replicas that hold the state is left out. Neither is known to be at fault,
and one may only be slow: a member that joins an epoch too late makes it fail, too."""


@dataclass(frozen=True, slots=True)
class Failures:
    """Epochs in a row that failed, presumably because of one replica."""

    epochs: int = 0
    source: int = 0  # Incarnation of the replica that sent the state in them
    since: float = 0.0  # Time at which the first of them broke. Unix seconds.
    for_s: float = 0.0  # From then until the newest of them broke
    seeded: bool = False
    """The replica had the state in the newest of them: another one may be the cause."""


@dataclass(slots=True)
class Worker:
    """The fields of its WorkerSpec, and what has become of it since."""

    worker_id: str
    incarnation: int
    role: Role
    host: str
    pid: int
    tensor_host: str
    ranks: int
    state_version: Version  # Policy: version of the state it holds; -1 for none
    lifecycle: Lifecycle = Lifecycle.STARTING
    drain: bool = False  # It was asked to leave
    spare: bool = False
    """Rollout: it stands by, with its model loaded and weights coming in, and leases nothing."""
    loaded_version: Version = Version(-1)  # Rollout: version its engine serves; -1 for none
    diverged_version: Version = Version(-1)
    """Its claims to states up to this version are not believed."""
    parity_failures: int = 0
    """Rollout: swaps after which its engine's parameters differed from the weights."""
    load_failures: int = 0  # Rollout: versions that came and could not be staged or loaded
    load_trouble: str = ""
    """Reason of the newest of them; empty once a newer version has been loaded."""
    withdrawn_version: Version = Version(-1)
    """Rollout: its weights of this version came from a replica that was outvoted."""
    lease_seq: int = 0
    lease_reply: tuple[LeasedTask, ...] = ()
    held: dict[TaskId, None] = field(default_factory=dict)  # Tasks leased to it
    failures: Failures = Failures()  # Policy: epochs in a row that failed, presumably because of it
    relay_faults: int = 0
    """Rollout: its links to receivers that broke since the present tree was planted."""
    scorer: str = ""
    address: str = ""
    cgroup: str = ""
    memory_kills: int = -1
    origins: Mapping[str, str] = field(default_factory=dict)
    seat: str = ""
    stopped_t: float = 0.0  # Time at which its launcher saw it stopped; 0: never. Unix seconds.
    death: FaultCause | None = None
    """Cause of its death, as far as it is known; None: it has not died."""
    silent_s: float = 0.0  # When it died: since when it had not been heard of, in seconds
    of_task: bool = False  # It died of the task or group that it was isolated with

    @property
    def who(self) -> tuple[str, int]:
        """(worker id, incarnation) of this process."""
        return self.worker_id, self.incarnation

    @property
    def process(self) -> str:
        """Its name among all processes there were: in a pod each has the same pid."""
        return f"{self.worker_id}/{self.incarnation}"

    @property
    def pool(self) -> str:
        """Pool of the workers that can take its place; the desired numbers are by pool."""
        return pool_of(self.role, self.scorer)

    @property
    def alive(self) -> bool:
        return self.lifecycle not in (Lifecycle.DEAD, Lifecycle.STOPPED)

    @property
    def leaving(self) -> bool:
        return self.drain or self.lifecycle is Lifecycle.DRAINING

    @property
    def joinable(self) -> bool:
        """Ready for work and meant to stay."""
        return self.lifecycle is Lifecycle.RUNNING and not self.drain


@dataclass(frozen=True, slots=True)
class Mesh(MeshSpec):
    broken: bool = False


@dataclass(slots=True)
class Fleet:
    workers: dict[str, Worker] = field(default_factory=dict)
    retired: dict[str, list[int]] = field(default_factory=dict)
    """Earlier incarnations by worker id, newest last."""
    mesh: Mesh | None = None
    mesh_epoch: MeshEpoch = MeshEpoch(0)
    mesh_rebuilds: int = 0  # Epochs formed because the one before broke
    rebuild_due: bool = False
    parity_failures: int = 0  # Failures of all workers there ever were
    links: dict[str, LinkSpec] = field(default_factory=dict)
    link_generation: int = 0
    tree: int = 0  # Number of the newest tree: the generation of its first link; 0 without relays
    tree_planted: tuple[int, Version] = (0, Version(-1))
    """Term and newest committed version when it was planted."""
    former: dict[str, dict[str, None]] = field(default_factory=dict)
    """Receivers that have lost their link from a sender since the newest commit, by sender: they
    may have the newest version from it."""
    seats: Seats = field(default_factory=Seats)
    hosts: Hosts = field(default_factory=Hosts)
    _living: dict[Role, dict[str, Worker]] = field(
        default_factory=dict, init=False, repr=False, metadata=TRANSIENT
    )  # Living ones of ``workers``, in the same order
    _sent: dict[str, dict[str, None]] = field(
        default_factory=dict, init=False, repr=False, metadata=TRANSIENT
    )  # Receivers of ``links``, by publisher

    def __post_init__(self) -> None:
        self._living = {role: {} for role in Role}
        for worker in self.workers.values():
            if worker.alive:
                self._living[worker.role][worker.worker_id] = worker
        for link in self.links.values():
            self._sent.setdefault(link.publisher, {})[link.receiver] = None

    @property
    def whole_mesh(self) -> Mesh | None:
        """The newest epoch, unless it is over."""
        return None if self.mesh is None or self.mesh.broken else self.mesh

    def current(self, worker_id: str, incarnation: int) -> Worker | None:
        worker = self.workers.get(worker_id)
        if worker is None or worker.incarnation != incarnation or not worker.alive:
            return None
        return worker

    def living(self, role: Role) -> list[Worker]:
        return list(self._living[role].values())

    def at_work(self) -> list[Worker]:
        """Rollout workers that may lease tasks."""
        return [w for w in self._living[Role.ROLLOUT].values() if self.may_lease(w)]

    def may_lease(self, worker: Worker) -> bool:
        return not worker.leaving and not worker.spare and not self.shuns(worker)

    def shuns(self, worker: Worker) -> bool:
        """True if its host is blocked, and another host has a worker at work in its place."""
        if not self.hosts.blocks(worker.host):
            return False
        others = (w for w in self._living[worker.role].values() if w.pool == worker.pool)
        return any(w.joinable and not self.hosts.blocks(w.host) for w in others)

    def occupies(self, worker: Worker) -> bool:
        """True if it may be using its devices: its own, or a seat that it holds."""
        seat = self.seats.by_name.get(worker.seat)
        return seat is None or seat.holder == worker.who

    def seated(self, worker: Worker) -> bool:
        """True if it may begin something on its devices: nobody asks for its seat."""
        seat = self.seats.by_name.get(worker.seat)
        return seat is None or (seat.holder == worker.who and not seat.asked)

    def doubt_grants(self) -> None:
        """The journal may have lost its end: anybody with a seat may be using it, registered or
        not."""
        self.seats.doubted = True
        living = [w for role in Role for w in self.living(role)]
        for seat in self.seats.by_name.values():
            others = (w.who for w in living if w.seat == seat.name and w.who != seat.holder)
            seat.strays = tuple(others)

    @property
    def may_form(self) -> bool:
        """The members of the newest epoch may form another one: with turns once all of them hold
        their seats; those that have lent theirs leave."""
        return self.seats.to_train > 0 or all(map(self.seated, self.members()))

    def count(self, role: Role) -> int:
        return len(self._living[role])

    def living_in(self, pool: str) -> list[Worker]:
        return [w for role in Role for w in self.living(role) if w.pool == pool]

    def scorers(self) -> list[Worker]:
        """Scorers that are ready for requests, by worker id."""
        return sorted(
            (w for w in self.living(Role.SCORER) if w.joinable and not self.shuns(w)),
            key=lambda w: w.worker_id,
        )

    def holders(self, version: Version) -> list[Worker]:
        """Living policy replicas that hold the state of ``version``."""
        return [w for w in self.living(Role.POLICY) if w.state_version == version]

    def members(self) -> list[Worker]:
        members = self.mesh.members if self.mesh else ()
        return [worker for m in members if (worker := self.current(*m.who)) is not None]

    def in_mesh(self, worker: Worker) -> bool:
        """True if it is a member of the newest epoch, which may be over."""
        return self.mesh is not None and self.mesh.rank(*worker.who) >= 0

    def sources(self, version: Version) -> list[Worker]:
        """The replicas that send weights, in rank order: the living members that hold the state."""
        return [w for w in self.members() if w.state_version == version]

    def failures_after(self, now: float) -> list[tuple[Worker, Failures]]:
        """Possible causes if the present epoch fails, with their failures once it has: the members
        that still lack its state. If all have it and no step has been committed, any connection may
        have failed: then the last member, because it holds up the fewest others."""
        mesh, members = self.mesh, self.members()
        if mesh is None:
            return []
        source = mesh.members[max(0, mesh.source_rank)].incarnation
        lacking = {m.worker_id for m in mesh.members if m.needs_state}
        behind = (w for w in members if w.state_version < mesh.state_version)
        blamed = [w for w in behind if w.worker_id in lacking]
        seeded = not blamed
        if seeded and all(w.state_version <= mesh.state_version for w in members):
            blamed = [w for w in members if w.incarnation != source][-1:]
        found = []
        for worker in blamed:
            before = worker.failures
            if not before.epochs or before.source != source:
                before = Failures(since=now)
            # A clock that was set back would otherwise count the hours until it is there again.
            since = min(before.since, now)
            failures = Failures(before.epochs + 1, source, since, now - since, seeded)
            found.append((worker, failures))
        return found

    def left_out(self, worker: Worker, newest: Version, failures: Failures | None = None) -> bool:
        """Every epoch of it and the replica with the state fails, and the run can do without it.
        ``failures``: its own, if none are given."""
        failures = failures or worker.failures
        if failures.epochs < TRIES:
            return False
        there = self.holders(newest) or self.living(Role.POLICY)
        found = (w for w in there if w is not worker and w.incarnation == failures.source)
        if (source := next(found, None)) is None:
            return False
        # If the source is asked to leave, its possible successor gets a second chance.
        tries = 2 * TRIES if source.leaving else TRIES
        limit_s = HOLDER_S if failures.seeded else JOINER_S
        return failures.epochs >= tries and failures.for_s >= limit_s

    def register(self, worker: Worker) -> None:
        before = self.workers.pop(worker.worker_id, None)
        if before is not None:
            self._living[before.role].pop(worker.worker_id, None)
            retired = self.retired.setdefault(worker.worker_id, [])
            retired.append(before.incarnation)
            del retired[:-_RETIRED_KEPT]
            worker.diverged_version = before.diverged_version
        self.workers[worker.worker_id] = worker
        self._living[worker.role][worker.worker_id] = worker
        self.seats.join(worker.seat)
        if worker.seat and self.seats.doubted:
            self.seats.by_name[worker.seat].strays += (worker.who,)
        gone = [w.worker_id for w in self.workers.values() if not w.alive]
        for worker_id in gone[:-_GONE_KEPT]:
            del self.workers[worker_id]
            self.retired.pop(worker_id, None)

    def leave(self, worker: Worker, lifecycle: Lifecycle, t: float = 0.0) -> None:
        """``t``: the time, if it is known. Unix seconds."""
        worker.lifecycle = lifecycle
        worker.lease_reply = ()
        worker.state_version = worker.loaded_version = Version(-1)
        self._living[worker.role].pop(worker.worker_id, None)
        if worker.seat:
            others = {w.seat for role in Role for w in self.living(role)}
            self.seats.leave(worker.seat, worker.who, others, t)
        for link in self.links_of(worker.worker_id):
            self._part(link)
            del self.links[link.receiver]
        self._sent.pop(worker.worker_id, None)

    def links_of(self, worker_id: str) -> list[LinkSpec]:
        """Links that the worker sends over, oldest first, and the one over which it receives."""
        sent = (self.links[receiver] for receiver in self._sent.get(worker_id, ()))
        found = sorted(sent, key=lambda link: link.generation)
        own = self.links.get(worker_id)
        return found if own is None or own.publisher == worker_id else [*found, own]

    def roots(self) -> list[Worker]:
        """Replicas that have links to send over."""
        return [w for w in self._living[Role.POLICY].values() if self._sent.get(w.worker_id)]

    def sends_to(self, worker_id: str) -> int:
        return len(self._sent.get(worker_id, ()))

    def receivers_of(self, worker: Worker) -> list[Worker]:
        """A link ends with each of its ends: all are alive."""
        return [self.workers[name] for name in self._sent.get(worker.worker_id, ())]

    def all_below(self, worker: Worker) -> list[Worker]:
        """Receivers that may have the newest version from the worker, over however many relays."""
        senders, found = [worker], {worker.worker_id}
        for sender in senders:
            names = (*self._sent.get(sender.worker_id, ()), *self.former.get(sender.worker_id, ()))
            for name in names:
                receiver = self.workers.get(name)
                if receiver is not None and name not in found:
                    found.add(name)
                    senders.append(receiver)
        return senders[1:]

    def assign(self, link: LinkSpec) -> None:
        """The receiver of ``link`` receives over it from here on, and over no other."""
        before = self.links.get(link.receiver)
        if before is not None:
            self._part(before)
        self.link_generation = link.generation
        self.links[link.receiver] = link
        self._sent.setdefault(link.publisher, {})[link.receiver] = None

    def _part(self, link: LinkSpec) -> None:
        """The receiver gets nothing more over ``link``."""
        self._sent[link.publisher].pop(link.receiver)
        self.former.setdefault(link.publisher, {})[link.receiver] = None
