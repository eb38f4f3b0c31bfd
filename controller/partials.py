"""What running tasks have so far: kept beside the ledger, for whoever leases them next.

    ReportPartials ──check──► store (one per task) ──► the next lease of the task ──► deleted with it

Nothing here is an event and no promise rests on it. Whatever is stored is a true beginning of its
task (tokens, log-probs and versions belong together), so the worst that a lost, late or stale report
can cost is tokens that are generated again.

- Of one attempt the longest report is kept, of several attempts the newest's. The write is fenced
  by the leader's term.
- A sample goes on only if it would still be accepted, were it finished now: its oldest token must be
  fresh enough. Else it begins anew.
- Kept up to a size in all; what does not fit is not kept.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from controller.errors import NotLeading
from controller.keys import Keys
from controller.ledger.commands import LeasedTask
from controller.ledger.events import EvalTaskDone, Event, GroupAccepted, TaskDropped
from controller.ledger.state import State
from controller.ledger.views import may_continue, unfinished
from controller.scripts import Script
from paceline.log import event
from paceline.v1 import rollout_pb2

log = logging.getLogger(__name__)

# KEYS: term, one for each task. ARGV: term, then attempt, tokens and data of each task.
_PUT = Script("""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
for i = 2, #KEYS do
  local attempt, tokens = tonumber(ARGV[3 * i - 4]), tonumber(ARGV[3 * i - 3])
  local old = redis.call('HMGET', KEYS[i], 'attempt', 'tokens')
  local before = tonumber(old[1] or '0')
  if attempt > before or (attempt == before and tokens >= tonumber(old[2] or '0')) then
    redis.call('HSET', KEYS[i], 'attempt', attempt, 'tokens', tokens, 'data', ARGV[3 * i - 2])
  end
end
return 1
""")


@dataclass(frozen=True, slots=True)
class Partial:
    """One report, checked at the door."""

    task_id: str
    attempt: int
    tokens: int
    """Over all completions."""
    data: bytes
    """The serialised PartialGroup."""


class PartialStore(Protocol):
    async def put(self, term: int, partials: Sequence[Partial]) -> bool:
        """False, with nothing stored, where ``term`` is over."""
        ...

    async def get(self, task_ids: Sequence[str]) -> list[bytes | None]: ...

    async def delete(self, task_ids: Sequence[str]) -> None: ...

    async def sizes(self) -> dict[str, int]:
        """Bytes by task."""
        ...


class RedisPartials:
    def __init__(self, redis: Any, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    async def put(self, term: int, partials: Sequence[Partial]) -> bool:
        keys = [self._keys.term, *(self._keys.partial(p.task_id) for p in partials)]
        arguments: list[Any] = [str(term)]
        for partial in partials:
            arguments += [partial.attempt, partial.tokens, partial.data]
        return bool(await _PUT.run(self._redis, keys, arguments))

    async def get(self, task_ids: Sequence[str]) -> list[bytes | None]:
        pipe = self._redis.pipeline(transaction=False)
        for task_id in task_ids:
            pipe.hget(self._keys.partial(task_id), "data")
        found: list[bytes | None] = await pipe.execute()
        return found

    async def delete(self, task_ids: Sequence[str]) -> None:
        if task_ids:
            await self._redis.unlink(*(self._keys.partial(task_id) for task_id in task_ids))

    async def sizes(self) -> dict[str, int]:
        names = [n async for n in self._redis.scan_iter(match=self._keys.partial("*"), count=1000)]
        pipe = self._redis.pipeline(transaction=False)
        for name in names:
            pipe.hstrlen(name, "data")
        found = await pipe.execute()
        return {
            name.decode().rpartition(":")[2]: size for name, size in zip(names, found, strict=True)
        }


class FilePartials:
    """In the payloads' directory, for runs whose payloads outgrow Redis. A first line says whose and
    how long the rest is; a file that a power cut left incomplete counts as none."""

    def __init__(self, directory: Path, is_term: Any) -> None:
        """``is_term(term)``: awaitable; whether it is the highest granted."""
        self._directory = directory
        self._is_term = is_term
        self._writing = asyncio.Lock()

    async def put(self, term: int, partials: Sequence[Partial]) -> bool:
        if not await self._is_term(term):
            return False
        async with self._writing:
            await asyncio.to_thread(self._write, partials)
        return True

    async def get(self, task_ids: Sequence[str]) -> list[bytes | None]:
        return await asyncio.to_thread(lambda: [self._read(t)[1] for t in task_ids])

    async def delete(self, task_ids: Sequence[str]) -> None:
        def remove() -> None:
            for task_id in task_ids:
                self._path(task_id).unlink(missing_ok=True)

        await asyncio.to_thread(remove)

    async def sizes(self) -> dict[str, int]:
        found = await asyncio.to_thread(lambda: list(self._directory.glob("*.partial")))
        return {path.stem: path.stat().st_size for path in found}

    def _path(self, task_id: str) -> Path:
        return self._directory / f"{task_id}.partial"

    def _write(self, partials: Sequence[Partial]) -> None:
        for partial in partials:
            mine = partial.attempt, partial.tokens
            if self._read(partial.task_id)[0] > mine:
                continue
            path = self._path(partial.task_id)
            part = path.with_suffix(f".{os.getpid()}.part")
            head = json.dumps([*mine, len(partial.data)]).encode()
            part.write_bytes(head + b"\n" + partial.data)
            part.replace(path)

    def _read(self, task_id: str) -> tuple[tuple[int, int], bytes | None]:
        try:
            head, _, data = self._path(task_id).read_bytes().partition(b"\n")
            attempt, tokens, size = json.loads(head)
        except (FileNotFoundError, ValueError):
            return (0, 0), None
        return ((attempt, tokens), data) if len(data) == size else ((0, 0), None)


class PartialWork:
    """One leader's view of the store. ``state``: the ledger's."""

    def __init__(self, store: PartialStore, state: State, *, term: int, limit_bytes: int) -> None:
        self._store = store
        self._state = state
        self._term = term
        self._limit = limit_bytes
        self._sizes: dict[str, int] = {}
        """Bytes by task of what is stored, as far as this leader knows."""
        self._full = False

    async def begin(self) -> None:
        """Learns what earlier leaders have stored, and deletes what nobody needs."""
        try:
            found = await self._store.sizes()
        except (RedisError, OSError):
            return
        self._sizes = found | self._sizes
        await self.delete([task_id for task_id in found if not unfinished(self._state, task_id)])

    async def keep(self, partials: Sequence[Partial]) -> list[bool]:
        """Stores reports; False for one there is no room for. Raises NotLeading where the term is
        over or Redis is away: the worker says it again."""
        fitting = []
        total = sum(self._sizes.values())
        for partial in partials:
            more = len(partial.data) - self._sizes.get(partial.task_id, 0)
            if total + more <= self._limit:
                total += more
                self._sizes[partial.task_id] = len(partial.data)
                fitting.append(partial)
        try:
            if fitting and not await self._store.put(self._term, fitting):
                raise NotLeading("stepped down")
        except (OutOfMemoryError, ResponseError) as error:
            self._say_full(str(error))
            return [False] * len(partials)
        except (RedisError, OSError) as error:
            raise NotLeading(f"waiting for the store ({type(error).__name__})") from error
        self._say_full(
            "" if len(fitting) == len(partials) else "rollout.partial_store_mb is used up"
        )
        # Finished while it was being stored: its deletion may have come first.
        await self.delete([p.task_id for p in fitting if not unfinished(self._state, p.task_id)])
        return [partial in fitting for partial in partials]

    async def of(
        self, leases: Sequence[LeasedTask], limit_bytes: int
    ) -> dict[str, rollout_pb2.PartialGroup]:
        """What there is for tasks that are leased again, as far as it may be used, by task."""
        again = [lease.task_id for lease in leases if lease.attempt > 1]
        if not again:
            return {}
        try:
            found = await self._store.get(again)
        except (RedisError, OSError) as error:
            event(log, "partial work not read", logging.WARNING, why=type(error).__name__)
            return {}
        usable = {}
        for task_id, data in zip(again, found, strict=True):
            limit_bytes -= len(data or b"")
            if data is not None and limit_bytes >= 0:
                group = fresh_part(self._state, rollout_pb2.PartialGroup.FromString(data))
                if group is not None:
                    usable[task_id] = group
        return usable

    def finished(self, events: Iterable[Event]) -> list[str]:
        """Tasks that these events have finished and of which something is stored."""
        done = set()
        for e in events:
            if isinstance(e, GroupAccepted):
                done.add(e.group.task_id)
            elif isinstance(e, TaskDropped | EvalTaskDone):
                done.add(e.task_id)
        return sorted(done & self._sizes.keys())

    async def delete(self, task_ids: Sequence[str]) -> None:
        try:
            await self._store.delete(task_ids)
        except (RedisError, OSError) as error:
            # The next leader finds it.
            event(log, "partial work not deleted", logging.WARNING, why=type(error).__name__)
            return
        for task_id in task_ids:
            self._sizes.pop(task_id, None)

    def _say_full(self, why: str) -> None:
        if why and not self._full:
            event(log, "partial work not kept", logging.WARNING, why=why)
        self._full = bool(why)


def fresh_part(state: State, group: rollout_pb2.PartialGroup) -> rollout_pb2.PartialGroup | None:
    """The group with the samples emptied that may not go on; None where none may."""
    stale = 0
    for completion in group.completions:
        if completion.versions and not may_continue(
            state, group.task.task_id, completion.versions[0].version
        ):
            completion.Clear()
            stale += 1
    if stale:
        event(log, "partial work discarded", task=group.task.task_id, samples=stale, why="stale")
    return group if any(c.versions for c in group.completions) else None
