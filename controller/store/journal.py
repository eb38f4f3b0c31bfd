"""Journal of a run: its events in a Redis Stream, one entry for each flush.

- One script checks the append: the term must be the highest granted, and the entry must follow the
  one that the writer knows. A deposed leader's append is therefore refused.
- If the answer to an append was lost, the writer repeats it. The head names the newest batch, so a
  batch that was already appended is recognised and not written twice.
- An append is durable once it is in Redis' append-only file. While Redis syncs that file (each
  second, with appendfsync everysec), it may answer up to two seconds before it writes.
- A snapshot bounds replay. The stream is trimmed up to the previous snapshot, so that a standby
  that lags can follow. Entries are numbered, so a standby notices if its next entry was trimmed.
- A snapshot is written piece by piece under a name of its own, which expires, and takes the place
  of the one before in one script. A repeated write of a piece has no further effect.
- Journal and snapshot contain the number of their format. Other formats are refused and not
  changed.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from redis.exceptions import OutOfMemoryError, ResponseError

from controller.ledger.events import Event, from_json
from controller.store.redis_keys import Keys, Script, replicated
from controller.store.snapshot_json import snapshot_pieces
from paceline.errors import BadInput
from paceline.payloads.transfer_limits import in_time

FORMAT = 3
"""Rises with every change of events or state that earlier releases cannot read; 1 had no number."""
START = "0-0"
READ_COUNT = 256
WRITTEN_AGAIN_S = 0.001
STAGED_S = 600  # After it a snapshot that was begun and not finished is gone
SNAPSHOT_PIECE_BYTES = 1 << 20  # Bytes of a snapshot that one command reads

# KEYS: journal, head, term. ARGV: term, previous batch, batch, number, entry, format. The
# last part of the answer is 0 if Redis writes its append-only file before it answers.
_APPEND = Script("""
local info = redis.pcall('INFO', 'persistence')
local syncing = type(info) == 'string' and string.match(info, 'aof_pending_bio_fsync:(%d+)') or '0'
local head = redis.call('HMGET', KEYS[2], 'batch', 'position', 'format')
if head[1] and head[3] ~= ARGV[6] then return {'format', head[3] or '1', syncing} end
if head[1] == ARGV[3] then return {'appended', head[2], syncing} end
local term = redis.call('GET', KEYS[3])
if term ~= ARGV[1] then return {'deposed', term or 'none', syncing} end
if (head[1] or '') ~= ARGV[2] then return {'diverged', head[1] or 'nothing', syncing} end
local position = redis.call('XADD', KEYS[1], '*', 'n', ARGV[4], 'b', ARGV[3], 'e', ARGV[5])
redis.call('HSET', KEYS[2], 'batch', ARGV[3], 'position', position, 'n', ARGV[4], 'term', ARGV[1],
  'format', ARGV[6])
return {'appended', position, syncing}
""")

# 1 if all earlier writes are in the append-only file, else 0.
_WRITTEN = Script("""
local info = redis.pcall('INFO', 'persistence')
if type(info) ~= 'string' then return 1 end
if (string.match(info, 'aof_pending_bio_fsync:(%d+)') or '0') == '0' then return 1 end
return (string.match(info, 'aof_buffer_length:(%d+)') or '0') == '0' and 1 or 0
""")

# KEYS: journal, snapshot, term, staged snapshot. ARGV: term, its last piece, position to trim
# before, length of the pieces before that, position. A journal that has lost its end must not get a
# snapshot of what it lacks: nobody could go on from there.
_SNAPSHOT = Script("""
if redis.call('GET', KEYS[3]) ~= ARGV[1] then return 0 end
if #redis.call('XRANGE', KEYS[1], ARGV[5], ARGV[5]) == 0 then return 0 end
if redis.call('STRLEN', KEYS[4]) ~= tonumber(ARGV[4]) then return -1 end
redis.call('APPEND', KEYS[4], ARGV[2])
redis.call('PERSIST', KEYS[4])
redis.call('RENAME', KEYS[4], KEYS[2])
if ARGV[3] ~= '' then redis.call('XTRIM', KEYS[1], 'MINID', ARGV[3]) end
return 1
""")


class Deposed(Exception):
    """Another term was granted, or the journal has an entry that this leader does not know."""


class RedisFull(Exception):
    """Redis refuses writes because its memory is full (maxmemory)."""


class JournalGap(Exception):
    """Entries were trimmed before they were read: the ledger must be loaded again."""


class ForeignFormat(BadInput):
    """The journal or the snapshot has another format than this release reads and writes."""


def check_format(found: bytes | int | None) -> None:
    """Raises ForeignFormat unless ``found``, the number in a head or snapshot, is ours."""
    number = int(found or 1)
    if number != FORMAT:
        raise ForeignFormat(
            f"the run's journal has format {number}, and this release reads format {FORMAT} only. "
            "Finish the run with the release that wrote it, or start a new run with --fresh"
        )


@dataclass(frozen=True, slots=True)
class Position:
    """Point in the journal that a state corresponds to."""

    entry: str = START  # Stream id of the last entry that was applied
    number: int = 0  # Number of that entry, counted from the beginning of the run
    batch: str = ""  # Unique id of that entry's batch


@dataclass(frozen=True)
class Entry:
    at: Position
    term: int
    t: float  # Unix seconds at which the leader began to append it
    events: Sequence[Mapping[str, Any]]  # JSON objects with ``type``, as in the journal
    decided: Sequence[Event] = field(default=(), repr=False, compare=False)
    """The same, in the process that has decided them."""

    @cached_property
    def decoded(self) -> Sequence[Event]:
        return self.decided or [from_json(event) for event in self.events]

    @cached_property
    def records(self) -> Sequence[Mapping[str, Any]]:
        """The events for readers: one that is listed has its severity and text."""
        return [
            {**data, "severity": event.severity, "text": event.text()} if event.listed else data
            for event, data in zip(self.decoded, self.events, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    at: Position
    state: Mapping[str, Any]
    t: float
    observed: Mapping[str, Any] | None = None
    """A cache of what a projection has counted by then; None: it is being made."""


class Journal:
    """One run's journal. ``append`` and ``save_snapshot`` write, and check the writer's term."""

    def __init__(self, redis: Any, keys: Keys, bulk: Any = None) -> None:
        """``bulk``: client for appends, with patient sockets; default: ``redis``."""
        self._redis = redis
        self._bulk = redis if bulk is None else bulk
        self._keys = keys

    async def append(
        self,
        after: Position,
        *,
        term: int,
        batch: str,
        t: float,
        events: Sequence[Mapping[str, Any]],
    ) -> Position:
        """Appends one entry after ``after`` and returns its position. A repeat has no further
        effect. Raises Deposed, RedisFull or a connection error; after the last, the entry may be in
        the journal."""
        whole = {"term": term, "t": t, "events": events}
        entry, number = json.dumps(whole, separators=(",", ":")), after.number + 1
        verdict, detail = await self._write(after, term, batch, number, entry)
        if verdict == "appended":
            return Position(detail, number, batch)
        if verdict == "format":
            check_format(int(detail))
        raise Deposed(f"{verdict}: {detail}")

    async def read(
        self, after: Position, *, count: int = READ_COUNT, block_ms: int | None = None
    ) -> list[Entry]:
        """The next entries, at most ``count``; waits up to ``block_ms`` for the first one. Raises
        JournalGap if the stream was trimmed past ``after``."""
        entries = await self._next(after.entry, count, block_ms)
        expected = after.number + 1
        for entry in entries:
            if entry.at.number != expected:
                raise JournalGap(f"entry {entry.at.number} where {expected} was due")
            expected += 1
        return entries

    async def load_snapshot(self) -> LedgerSnapshot | None:
        """The newest snapshot. Raises ForeignFormat if it or the journal is of another release."""
        await self._check_format()
        data = await self._get_snapshot()
        if data is None:
            return None
        raw = json.loads(data)
        check_format(raw.get("format"))
        at = Position(*raw["at"])
        return LedgerSnapshot(at, raw["state"], raw["t"], raw.get("observed"))

    async def save_snapshot(self, snapshot: LedgerSnapshot, *, term: int, trim_before: str) -> None:
        """Stores ``snapshot`` and drops entries before stream id ``trim_before`` (empty: none).
        Raises Deposed."""
        at = snapshot.at
        whole = {
            "format": FORMAT,
            "at": [at.entry, at.number, at.batch],
            "state": snapshot.state,
            "t": snapshot.t,
            "observed": snapshot.observed,
        }
        staged = f"{term}.{at.number}"
        last, length = "", 0
        async for piece in snapshot_pieces(whole):
            if last:
                await self._stage_snapshot(staged, length, last)
                length += len(last)
            last = piece
        if not await self._set_snapshot(last, term, trim_before, staged, length, at.entry):
            raise Deposed("snapshot refused")

    # ---- Redis ----------------------------------------------------------------------------

    async def _write(
        self, after: Position, term: int, batch: str, number: int, entry: str
    ) -> tuple[str, str]:
        """(verdict, detail) of the append; returns once the entry is in the append-only file."""
        keys = [self._keys.journal, self._keys.head, self._keys.term]
        arguments = [str(term), after.batch, batch, number, entry, FORMAT]
        try:
            async with in_time(len(entry)):
                reply = await _APPEND.run(self._bulk, keys, arguments)
        except ResponseError as error:
            _raise_failure([error])
            raise
        verdict, detail, syncing = (part.decode() for part in reply)
        if syncing != "0":
            # Redis does not notify clients once it has written, so poll.
            while True:
                if await _WRITTEN.run(self._redis, [], []):
                    break
                await asyncio.sleep(WRITTEN_AGAIN_S)
        return verdict, detail

    async def replicated(self, *, expected: bool) -> bool:
        """True if a replica of Redis has all writes. ``expected``: False if none is connected."""
        return await replicated(self._redis, self._keys, expected=expected)

    async def _next(self, after: str, count: int, block_ms: int | None) -> list[Entry]:
        found = await self._redis.xread({self._keys.journal: after}, count=count, block=block_ms)
        if not found:
            return []
        rows = found[0][1] if isinstance(found, list) else next(iter(found.values()))[0]
        return [decode_entry(position, fields) for position, fields in rows]

    async def scan(self, after: str, *, until: str = "+", count: int = READ_COUNT) -> list[Entry]:
        """The next kept entries after stream id ``after``. Does not check for a gap."""
        rows = await self._redis.xrange(self._keys.journal, min=f"({after}", max=until, count=count)
        return [decode_entry(position, fields) for position, fields in rows]

    async def head(self) -> Position:
        fields = await self._redis.hgetall(self._keys.head)
        if not fields:
            return Position()
        return Position(fields[b"position"].decode(), int(fields[b"n"]), fields[b"batch"].decode())

    async def _check_format(self) -> None:
        batch, found = await self._redis.hmget(self._keys.head, "batch", "format")
        if batch is not None:
            check_format(found)

    async def _get_snapshot(self) -> str | bytes | None:
        """In pieces: a whole one of a long run outlasts the client's time limit for a reply."""
        while head := await self._snapshot_piece(0):
            pieces = [head]
            while len(pieces[-1]) == SNAPSHOT_PIECE_BYTES:
                pieces.append(await self._snapshot_piece(len(pieces)))
            # Begins with its position: if that is another one now, the pieces may be of two
            # snapshots.
            if await self._snapshot_piece(0) == head:
                return b"".join(pieces)
        return None

    async def _snapshot_piece(self, number: int) -> bytes:
        first = number * SNAPSHOT_PIECE_BYTES
        last = first + SNAPSHOT_PIECE_BYTES - 1
        return bytes(await self._redis.getrange(self._keys.snapshot, first, last))

    async def _stage_snapshot(self, staged: str, offset: int, piece: str) -> None:
        pipe = self._bulk.pipeline(transaction=False)
        key = self._keys.staged_snapshot(staged)
        pipe.setrange(key, offset, piece)
        pipe.expire(key, STAGED_S)
        _raise_failure(await pipe.execute(raise_on_error=False))

    async def _set_snapshot(
        self, last: str, term: int, trim_before: str, staged: str, length: int, at: str
    ) -> bool:
        """``last``: the piece after the ``length`` characters that are staged."""
        key = self._keys.staged_snapshot(staged)
        kept = await _SNAPSHOT.run(
            self._redis,
            [self._keys.journal, self._keys.snapshot, self._keys.term, key],
            [str(term), last, trim_before, length, at],
        )
        if kept == -1:
            raise ConnectionError("the staged snapshot is gone: Redis was replaced meanwhile")
        return bool(kept)


def _raise_failure(replies: Sequence[Any]) -> None:
    """Raises the first error among the replies of a pipeline."""
    for reply in replies:
        if isinstance(reply, OutOfMemoryError) or (
            isinstance(reply, ResponseError) and "OOM" in str(reply)
        ):
            raise RedisFull(str(reply))
        if isinstance(reply, Exception):
            raise reply


def decode_entry(position: bytes, fields: Mapping[bytes, bytes]) -> Entry:
    raw = json.loads(fields[b"e"])
    at = Position(position.decode(), int(fields[b"n"]), fields[b"b"].decode())
    return Entry(at, int(raw["term"]), float(raw["t"]), raw["events"])
