"""In-memory replacements for Redis and the payload store, for simulations.

Operations are atomic where the real ones are scripts or pipelines. Requests and replies travel over
the simulated network, so an operation whose reply was lost has still happened. Its data survive its
process, as an append-only file does; a failover to a replica that lags loses the newest part of it.
"""

import asyncio
import json
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from controller.ledger import events as ev
from controller.store.election import Election
from controller.store.journal import Entry, Journal, Position
from controller.store.stores import RunRegistry, Stores
from paceline.payloads.store import Payloads, Ref, Refs
from paceline.redis.leader_lease import LeaderIdentity
from testbed.simulator.virtual_time import TIMEOUT, Network, Process, ProcessClock, settle

T = TypeVar("T")
ANSWER_S = 0.5
"""How long a client waits for an answer."""


def order(position: str) -> tuple[int, int]:
    """Sort key of a stream id."""
    time, _, number = position.partition("-")
    return int(time), int(number)


@dataclass(frozen=True, slots=True)
class Landed:
    """One entry of the stream."""

    entry: Entry
    events: tuple[ev.Event, ...]

    @property
    def id(self) -> tuple[int, int]:
        """Its stream id, as it is ordered."""
        return order(self.entry.at.entry)


@dataclass
class MemoryRedis:
    """Lease and term, the fenced journal, snapshots, payloads."""

    process: Process
    network: Network
    fenced: bool = True
    holder: str = ""
    """Identity of who has the lease, as JSON."""
    expires: float = 0.0
    term: int = 0
    entries: list[Landed] = field(default_factory=list)
    first: int = 0
    """Entries before this one have been trimmed."""
    failovers: int = 0
    lagging: Callable[[], bool] = lambda: False
    """True if the replica has not got the newest entries when somebody asks."""
    replicated: int = 0
    """Entries that the replica is known to have: a failover does not lose them."""
    deleted: int = 0
    """Payloads that were deleted."""
    payload_files: bool = False
    """Payloads are files beside the Redis, and a failover brings none back."""
    snapshots: list[str] = field(default_factory=list)
    staged: dict[str, str] = field(default_factory=dict)
    """Snapshots of which some pieces have come, by the name of their key."""
    payloads: dict[Ref, int] = field(default_factory=dict)
    """To the number of entries that were there when they were stored."""
    lost: set[Ref] = field(default_factory=set)
    """Payloads that a failover has lost."""
    landed: Callable[[Landed], None] = lambda landed: None
    saved: Callable[[int, str, Any], None] = lambda number, state, observed: None
    _deleted: list[tuple[int, Ref, int]] = field(default_factory=list)
    _readers: list[tuple[Process, asyncio.Future[list[Landed]]]] = field(default_factory=list)

    @property
    def leader(self) -> str:
        """Id of the controller that has the lease, or had it last."""
        return json.loads(self.holder)["controller_id"] if self.holder else ""

    # ---- lease and term -------------------------------------------------------------------

    def acquire(self, identity: str, lease_s: float, known_term: int) -> int | None:
        now = self.process.timeline.now
        if self.holder and self.expires > now:
            return None
        written = self.entries[-1].entry.term if self.entries else 0
        self.term = max(int(now * 1000), self.term + 1, written + 1, known_term + 1)
        self.holder, self.expires = identity, now + lease_s
        return self.term

    def renew(self, identity: str, lease_s: float, term: int) -> bool:
        now = self.process.timeline.now
        if term != self.term or (self.holder != identity and self.expires > now):
            return False
        self.holder, self.expires = identity, now + lease_s
        return True

    def release(self, identity: str) -> None:
        if self.holder == identity:
            self.expires = 0.0

    def lease(self) -> tuple[str, float]:
        left_s = self.expires - self.process.timeline.now
        return (self.holder, left_s) if left_s > 0 else ("", 0.0)

    # ---- journal --------------------------------------------------------------------------

    def append(self, before: str, term: int, batch: str, number: int, text: str) -> tuple[str, str]:
        """(verdict, detail). ``before``: the batch that the writer believes to be the last one."""
        head = self.entries[-1].entry.at if self.entries else Position()
        if head.batch == batch:
            return "appended", head.entry
        if self.fenced and term != self.term:
            return "deposed", str(self.term)
        if self.fenced and head.batch != before:
            return "diverged", head.batch or "nothing"
        raw = json.loads(text)
        at = Position(f"{int(self.process.timeline.now * 1000)}-{number}", number, batch)
        landed = self.seen(Entry(at, raw["term"], raw["t"], raw["events"]))
        self.entries.append(landed)
        self.landed(landed)
        readers, self._readers = self._readers, []
        for process, poke in readers:
            self.network.send(self.process.name, process, settle, poke, [landed])
        return "appended", at.entry

    def seen(self, entry: Entry) -> Landed:
        """The entry, with its events read once more: the oracle's are its own."""
        return Landed(entry, tuple(ev.from_json(event) for event in entry.events))

    def next(
        self,
        after: str,
        count: int,
        reader: tuple[Process, asyncio.Future[list[Landed]]] | None = None,
    ) -> list[Landed]:
        """Entries after ``after``; if there are none, ``reader`` hears of the next one."""
        seen = order(after)
        at = bisect_right(self.entries, seen, lo=self.first, key=lambda landed: landed.id)
        if at == len(self.entries) and reader is not None:
            self._readers.append(reader)
        return self.entries[at : at + count]

    def save(self, data: str, term: int, trim_before: str) -> bool:
        raw = json.loads(data)
        if term != self.term or raw["at"][1] > len(self.entries):
            return False
        state = json.dumps(raw["state"], separators=(",", ":"))
        self.saved(raw["at"][1], state, raw["observed"])
        self.snapshots.append(data)
        while trim_before and self.entries[self.first].id < order(trim_before):
            self.first += 1
        return True

    # ---- payloads -------------------------------------------------------------------------

    def store(self, refs: Sequence[Ref]) -> None:
        for ref in refs:
            self.payloads.setdefault(ref, len(self.entries))

    def lose(self, ref: Ref) -> None:
        """The store has a fault of its own."""
        self.payloads.pop(ref, None)
        self.lost.add(ref)

    def delete(self, refs: Sequence[Ref]) -> None:
        for ref in refs:
            stored = self.payloads.pop(ref, None)
            if stored is not None:
                self.deleted += 1
                self._deleted.append((len(self.entries), ref, stored))

    # ---- replica --------------------------------------------------------------------------

    def replicate(self) -> bool:
        """True if the replica has every entry."""
        if self.lagging():
            return False
        self.replicated = len(self.entries)
        return True

    # ---- fault ----------------------------------------------------------------------------

    def lose_tail(self, count: int) -> None:
        """Fails over to a replica that has not seen the last ``count`` entries, nor what was stored
        and deleted since."""
        self.failovers += 1
        kept = max(len(self.entries) - count, self.first, self.replicated)
        del self.entries[kept:]
        self.snapshots = [s for s in self.snapshots if json.loads(s)["at"][1] <= kept]
        if self.payload_files:
            self._deleted.clear()
            self.payloads = {ref: min(at, kept - 1) for ref, at in self.payloads.items()}
        for at, ref, stored in self._deleted:
            if at >= kept:
                self.payloads[ref] = stored
        self._deleted = [item for item in self._deleted if item[0] < kept]
        self.lost |= {ref for ref, at in self.payloads.items() if at >= kept}
        self.payloads = {ref: at for ref, at in self.payloads.items() if at < kept}
        self.term = self.entries[-1].entry.term if self.entries else 0
        self.holder, self.expires = "", 0.0


@dataclass(frozen=True)
class Link:
    """One controller's connection to the Redis."""

    redis: MemoryRedis
    process: Process

    async def call(self, operation: Callable[..., T], *args: Any) -> T:
        """The operation's result. Raises ConnectionError: then it may have happened or not."""
        redis, process = self.redis, self.process
        future = process.create_future()
        master = redis.failovers

        def serve() -> None:
            if redis.failovers == master:
                redis.network.send("redis", process, settle, future, operation(*args))

        redis.network.send(process.name, redis.process, serve)
        answer: T = await process.answer(future, ANSWER_S)
        if answer is TIMEOUT:
            raise ConnectionError("redis did not answer")
        return answer


class MemoryJournal(Journal):
    def __init__(self, link: Link) -> None:
        self._link = link

    async def _write(
        self,
        after: Position,
        term: int,
        batch: str,
        number: int,
        entry: str,
    ) -> tuple[str, str]:
        operation = self._link.redis.append
        return await self._link.call(operation, after.batch, term, batch, number, entry)

    async def _next(self, after: str, count: int, block_ms: int | None) -> list[Entry]:
        link, process = self._link, self._link.process
        poke = process.create_future()
        reader = (process, poke) if block_ms else None
        found = await link.call(link.redis.next, after, count, reader)
        if not found and block_ms:
            found = await process.answer(poke, block_ms / 1e3)
        return [landed.entry for landed in found] if found is not TIMEOUT else []

    async def scan(self, after: str, *, until: str = "+", count: int = 256) -> list[Entry]:
        found = await self._link.call(self._link.redis.next, after, count)
        return [x.entry for x in found if until == "+" or x.id <= order(until)]

    async def replicated(self, *, expected: bool) -> bool:
        return await self._link.call(self._link.redis.replicate)

    async def head(self) -> Position:
        entries = self._link.redis.entries
        return await self._link.call(lambda: entries[-1].entry.at if entries else Position())

    async def _check_format(self) -> None: ...

    async def _get_snapshot(self) -> str | None:
        return await self._link.call(lambda: next(reversed(self._link.redis.snapshots), None))

    async def _stage_snapshot(self, staged: str, offset: int, piece: str) -> None:
        pieces = self._link.redis.staged
        await self._link.call(pieces.__setitem__, staged, pieces.get(staged, "")[:offset] + piece)

    async def _set_snapshot(
        self, last: str, term: int, trim_before: str, staged: str, length: int, at: str
    ) -> bool:
        redis = self._link.redis
        whole = (redis.staged.pop(staged) if length else "") + last
        return await self._link.call(redis.save, whole, term, trim_before)


class MemoryElection(Election):
    def __init__(self, link: Link, identity: LeaderIdentity, *, lease_s: float) -> None:
        clock = ProcessClock(link.process)
        super().__init__(None, None, identity, lease_s=lease_s, clock=clock)  # type: ignore[arg-type]
        self._link = link

    async def _grant(self, known_term: int) -> int | None:
        operation = self._link.redis.acquire
        return await self._link.call(operation, self._identity, self._lease_s, known_term)

    async def _extend(self, term: int) -> bool:
        return await self._link.call(self._link.redis.renew, self._identity, self._lease_s, term)

    async def _delete(self) -> None:
        await self._link.call(self._link.redis.release, self._identity)

    async def is_newest(self, term: int) -> bool:
        return await self._link.call(lambda: self._link.redis.term == term)

    async def holder(self) -> tuple[LeaderIdentity | None, float]:
        holder, left_s = await self._link.call(self._link.redis.lease)
        return LeaderIdentity.from_json(holder) if holder else None, left_s


class MemoryPayloads:
    """Payloads that workers have stored. The bytes are not kept: whether they are there is
    enough."""

    largest = 1 << 30

    def __init__(self, link: Link) -> None:
        self._link = link

    async def put(self, payloads: Mapping[Ref, bytes]) -> None:
        await self._link.call(self._link.redis.store, list(payloads))

    async def get(self, refs: Sequence[Ref]) -> Payloads:
        stored = self._link.redis.payloads
        return await self._link.call(lambda: [b"" if r in stored else None for r in refs])

    async def stream(self, refs: Sequence[Ref]) -> AsyncIterator[bytes | None]:
        for data in await self.get(refs):
            yield data

    async def delete(self, refs: Sequence[Ref]) -> None:
        await self._link.call(self._link.redis.delete, refs)

    async def list(self) -> Refs:
        return await self._link.call(lambda: [*self._link.redis.payloads])

    async def missing(self, refs: Sequence[Ref]) -> Refs:
        stored = self._link.redis.payloads
        return await self._link.call(lambda: [r for r in refs if r not in stored])

    async def close(self) -> None: ...


class NoRegistry(RunRegistry):
    """All controllers of a simulated run have the same settings and know one another."""

    def __init__(self) -> None: ...

    async def agree(self, run: str, payload_urls: Sequence[str], config_json: str) -> None: ...

    async def announce(self, controller_id: str, about: dict[str, Any]) -> dict[str, Any]:
        return {}


async def _nothing() -> None: ...


def memory_stores(
    redis: MemoryRedis, process: Process, identity: LeaderIdentity, *, lease_s: float
) -> Stores:
    link = Link(redis, process)
    return Stores(
        journal=MemoryJournal(link),
        election=MemoryElection(link, identity, lease_s=lease_s),
        payloads=MemoryPayloads(link),
        registry=NoRegistry(),
        close=_nothing,
        url="redis://simulated",
        worker_url="redis://simulated",
    )
