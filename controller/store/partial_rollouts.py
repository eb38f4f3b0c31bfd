"""What running tasks have so far: kept beside the ledger, for whoever leases them next.

    ReportPartials ──check──► store (one per task) ──► the next lease of the task ──► deleted with it

Nothing here is an event and no promise rests on it. Whatever is stored is a true beginning of its
task (tokens, log-probs and versions belong together), so the worst that a lost, late or stale report
can cost is tokens that are generated again.

- Of one attempt the longest report is kept. Attempts run side by side where a task is leased twice:
  the newest's is kept, and the longest of the older ones for as long as it is the longer one. The
  next attempt goes on from whichever of the two has more that may still be used. The write is
  fenced by the leader's term.
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
from controller.ledger.commands import LeasedTask
from controller.ledger.events import EvalTaskDone, Event, GroupAccepted, TaskDropped
from controller.ledger.state import State
from controller.ledger.views import may_continue, unfinished
from controller.store.lua_scripts import Script
from controller.store.redis_keys import Keys
from paceline.process.structured_log import event
from paceline.v1 import rollout_pb2

log = logging.getLogger(__name__)

# KEYS: term, one for each task. ARGV: term, then attempt, tokens and data of each task.
# What stays is what ``merged`` says.
_PUT = Script("""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
for i = 2, #KEYS do
  local key = KEYS[i]
  local attempt, tokens = tonumber(ARGV[3 * i - 4]), tonumber(ARGV[3 * i - 3])
  local kept, outdone = {}, false
  for _, field in ipairs(redis.call('HKEYS', key)) do
    local other = tonumber(string.match(field, '^t(%d+)$') or '')
    if other then
      local has = tonumber(redis.call('HGET', key, field))
      kept[other] = has
      if (other == attempt and has > tokens) or (other > attempt and has >= tokens) then
        outdone = true
      end
    end
  end
  if not outdone then
    redis.call('HSET', key, 't' .. attempt, tokens, 'd' .. attempt, ARGV[3 * i - 2])
    kept[attempt] = tokens
    local newest, longest = 0, nil
    for other in pairs(kept) do newest = math.max(newest, other) end
    for other, has in pairs(kept) do
      if other ~= newest and not (other < attempt and has <= tokens)
          and (not longest or has > kept[longest] or (has == kept[longest] and other > longest)) then
        longest = other
      end
    end
    for other in pairs(kept) do
      if other ~= newest and other ~= longest then
        redis.call('HDEL', key, 't' .. other, 'd' .. other)
      end
    end
  end
end
return 1
""")

Kept = dict[int, tuple[int, int]]
"""Of one task: (tokens, bytes) by attempt."""


def merged(kept: Kept, attempt: int, tokens: int, size: int) -> Kept:
    """What is kept of a task once this report has come: at most two attempts.

    The newest, and the older one with most tokens as long as these are more. A report of an older
    attempt than one that has as much already changes nothing, nor does an overtaken one.
    """
    for other, (has, _) in kept.items():
        if (other == attempt and has > tokens) or (other > attempt and has >= tokens):
            return kept
    now = {a: has for a, has in kept.items() if a > attempt or has[0] > tokens}
    now[attempt] = tokens, size
    newest = max(now)
    older = max((has[0], a) for a, has in now.items() if a != newest) if len(now) > 1 else None
    return {a: has for a, has in now.items() if a == newest or (older and a == older[1])}


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

    async def get(self, task_ids: Sequence[str]) -> list[list[bytes]]:
        """What the attempts of each task have, newest first."""
        ...

    async def delete(self, task_ids: Sequence[str]) -> None: ...

    async def sizes(self) -> dict[str, Kept]: ...


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

    async def get(self, task_ids: Sequence[str]) -> list[list[bytes]]:
        pipe = self._redis.pipeline(transaction=False)
        for task_id in task_ids:
            pipe.hgetall(self._keys.partial(task_id))
        return [
            [found[b"d%d" % attempt] for attempt in sorted(_attempts(found), reverse=True)]
            for found in await pipe.execute()
        ]

    async def delete(self, task_ids: Sequence[str]) -> None:
        if task_ids:
            await self._redis.unlink(*(self._keys.partial(task_id) for task_id in task_ids))

    async def sizes(self) -> dict[str, Kept]:
        names = [n async for n in self._redis.scan_iter(match=self._keys.partial("*"), count=1000)]
        pipe = self._redis.pipeline(transaction=False)
        for name in names:
            pipe.hgetall(name)
        return {
            name.decode().rpartition(":")[2]: {
                a: (int(found[b"t%d" % a]), len(found[b"d%d" % a])) for a in _attempts(found)
            }
            for name, found in zip(names, await pipe.execute(), strict=True)
        }


def _attempts(found: dict[bytes, bytes]) -> list[int]:
    """Of a task's hash."""
    named = [int(field[1:]) for field in found if field[:1] == b"t" and field[1:].isdigit()]
    return [attempt for attempt in named if b"d%d" % attempt in found]


class FilePartials:
    """In the payloads' directory, for runs whose payloads outgrow Redis. A first line says of
    which attempts the rest is and how long; a file that a power cut left incomplete counts as none."""

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

    async def get(self, task_ids: Sequence[str]) -> list[list[bytes]]:
        def read() -> list[list[bytes]]:
            found = map(self._read, task_ids)
            return [[data for _, (_, data) in sorted(each.items())[::-1]] for each in found]

        return await asyncio.to_thread(read)

    async def delete(self, task_ids: Sequence[str]) -> None:
        def remove() -> None:
            for task_id in task_ids:
                self._path(task_id).unlink(missing_ok=True)

        await asyncio.to_thread(remove)

    async def sizes(self) -> dict[str, Kept]:
        def read() -> dict[str, Kept]:
            names = [path.stem for path in self._directory.glob("*.partial")]
            return {name: _sizes(self._read(name)) for name in names}

        return await asyncio.to_thread(read)

    def _path(self, task_id: str) -> Path:
        return self._directory / f"{task_id}.partial"

    def _write(self, partials: Sequence[Partial]) -> None:
        for partial in partials:
            old = self._read(partial.task_id)
            kept = merged(_sizes(old), partial.attempt, partial.tokens, len(partial.data))
            now = old | {partial.attempt: (partial.tokens, partial.data)}
            if partial.attempt not in kept or kept[partial.attempt][0] != partial.tokens:
                continue
            path = self._path(partial.task_id)
            part = path.with_suffix(f".{os.getpid()}.part")
            head = [[attempt, *has] for attempt, has in kept.items()]
            data = b"".join(now[attempt][1] for attempt in kept)
            part.write_bytes(json.dumps(head).encode() + b"\n" + data)
            part.replace(path)

    def _read(self, task_id: str) -> dict[int, tuple[int, bytes]]:
        """Tokens and data by attempt."""
        found: dict[int, tuple[int, bytes]] = {}
        try:
            head, _, rest = self._path(task_id).read_bytes().partition(b"\n")
            for attempt, tokens, size in json.loads(head):
                if len(rest) < size:
                    return {}
                found[attempt], rest = (tokens, rest[:size]), rest[size:]
        except (FileNotFoundError, ValueError, TypeError):
            return {}
        return found


def _sizes(found: dict[int, tuple[int, bytes]]) -> Kept:
    return {attempt: (tokens, len(data)) for attempt, (tokens, data) in found.items()}


class PartialRollouts:
    """One leader's view of the store. ``state``: the ledger's."""

    def __init__(self, store: PartialStore, state: State, *, term: int, limit_bytes: int) -> None:
        self._store = store
        self._state = state
        self._term = term
        self._limit = limit_bytes
        self._sizes: dict[str, Kept] = {}
        """By task, what is stored, as far as this leader knows."""
        self._writing = 0
        """Bytes on their way to the store."""
        self._unsure: set[str] = set()
        """Tasks of which something may be stored: the store did not answer."""
        self._full = False

    async def begin(self) -> None:
        """Learns what earlier leaders have stored, and deletes what nobody needs."""
        try:
            found = await self._store.sizes()
        except (RedisError, OSError):
            return
        for task_id, kept in found.items():
            self._sizes[task_id] = kept | self._sizes.get(task_id, {})
        await self.delete([task_id for task_id in found if not unfinished(self._state, task_id)])

    async def keep(self, partials: Sequence[Partial]) -> list[bool]:
        """Stores reports; False for one there is no room for. Raises NotLeading where the term is
        over or Redis is away: the worker says it again."""
        fitting = []
        more = 0
        room = self._limit - self._writing - sum(map(_bytes, self._sizes.values()))
        after: dict[str, Kept] = {}
        for partial in partials:
            task_id, size = partial.task_id, len(partial.data)
            kept = after.get(task_id, self._sizes.get(task_id, {}))
            new = merged(kept, partial.attempt, partial.tokens, size)
            if more + _bytes(new) - _bytes(kept) <= room:
                more += _bytes(new) - _bytes(kept)
                after[task_id] = new
                fitting.append(partial)
        more = max(more, 0)
        self._writing += more
        try:
            if fitting and not await self._store.put(self._term, fitting):
                raise NotLeading("stepped down")
        except (OutOfMemoryError, ResponseError) as error:
            self._say_full(str(error))
            return [False] * len(partials)
        except (RedisError, OSError) as error:
            self._unsure.update(after)
            raise NotLeading(f"waiting for the store ({type(error).__name__})") from error
        finally:
            self._writing -= more
        # Not before: what was not stored must not take up room for ever.
        for partial in fitting:
            kept = self._sizes.get(partial.task_id, {})
            self._sizes[partial.task_id] = merged(
                kept, partial.attempt, partial.tokens, len(partial.data)
            )
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
        for task_id, attempts in zip(again, found, strict=True):
            groups = [rollout_pb2.PartialGroup.FromString(data) for data in attempts]
            parts = [part for group in groups if (part := fresh_part(self._state, group))]
            best = max(parts, key=_tokens, default=None)
            if best is not None and (limit_bytes := limit_bytes - best.ByteSize()) >= 0:
                usable[task_id] = best
        return usable

    def finished(self, events: Iterable[Event]) -> list[str]:
        """Tasks that these events have finished and of which something is stored."""
        done = set()
        for e in events:
            if isinstance(e, GroupAccepted):
                done.add(e.group.task_id)
            elif isinstance(e, TaskDropped | EvalTaskDone):
                done.add(e.task_id)
        return sorted(done & (self._sizes.keys() | self._unsure))

    async def delete(self, task_ids: Sequence[str]) -> None:
        try:
            await self._store.delete(task_ids)
        except (RedisError, OSError) as error:
            # The next leader finds it.
            event(log, "partial work not deleted", logging.WARNING, why=type(error).__name__)
            return
        for task_id in task_ids:
            self._sizes.pop(task_id, None)
            self._unsure.discard(task_id)

    def _say_full(self, why: str) -> None:
        if why and not self._full:
            event(log, "partial work not kept", logging.WARNING, why=why)
        self._full = bool(why)


def _bytes(kept: Kept) -> int:
    return sum(size for _, size in kept.values())


def _tokens(group: rollout_pb2.PartialGroup) -> int:
    return sum(len(completion.tokens) for completion in group.completions)


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
