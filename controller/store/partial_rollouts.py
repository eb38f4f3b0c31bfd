"""Partial rollouts: the tokens of running tasks, kept beside the ledger for the next lease of the task.

    ReportPartials ──check──► store (one per task) ──► the next lease of the task ──► deleted with it

No promise depends on a report. A report is a consistent prefix of its task (tokens, log-probs and
versions), so if one is lost, late or stale, at most some tokens are generated again.

- One report is kept for a task: the longest of the newest attempt. A deposed leader cannot store one.
- A sample continues only if it would still be trained if it ended now (``views.may_continue``).
  Otherwise it starts again from the prompt.
- A size limit bounds all reports together. A report that would exceed it is not kept.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from controller.errors import NotLeading
from controller.ledger.commands import LeasedTask
from controller.ledger.events import EvalTaskDone, Event, GroupAccepted, TaskDropped
from controller.ledger.state import State
from controller.ledger.views import may_continue, unfinished
from controller.store.lua_scripts import Script
from controller.store.payloads import unlink
from controller.store.redis_keys import Keys
from paceline.ids import TaskId, Version
from paceline.process.structured_log import event
from paceline.v1 import rollout_pb2

log = logging.getLogger(__name__)

# KEYS: term, one for each task. ARGV: term, then attempt, tokens and data of each task.
_PUT = Script("""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
for i = 2, #KEYS do
  local attempt, tokens = tonumber(ARGV[3 * i - 4]), tonumber(ARGV[3 * i - 3])
  local found = redis.call('HMGET', KEYS[i], 'attempt', 'tokens')
  local before, has = tonumber(found[1] or 0), tonumber(found[2] or 0)
  if attempt > before or (attempt == before and tokens >= has) then
    redis.call('HSET', KEYS[i], 'attempt', attempt, 'tokens', tokens, 'data', ARGV[3 * i - 2])
  end
end
return 1
""")


@dataclass(frozen=True, order=True, slots=True)
class Kept:
    """Size of one task's report. A greater one (attempt, tokens) replaces a smaller one."""

    attempt: int
    tokens: int
    size: int = field(compare=False)
    """Bytes."""


@dataclass(frozen=True, slots=True)
class Partial:
    """One report that has passed validation."""

    task_id: TaskId
    attempt: int
    tokens: int
    """Over all completions."""
    data: bytes
    """The serialised PartialGroup."""

    @property
    def kept(self) -> Kept:
        return Kept(self.attempt, self.tokens, len(self.data))


class PartialStore(Protocol):
    async def put(self, term: int, partials: Sequence[Partial]) -> bool:
        """Stores reports. If a higher term was granted, stores nothing and returns False."""
        ...

    async def get(self, task_ids: Sequence[TaskId]) -> list[bytes | None]:
        """The data of each task; None if there is none."""
        ...

    async def delete(self, task_ids: Sequence[TaskId]) -> None: ...

    async def sizes(self) -> dict[TaskId, Kept]: ...


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

    async def get(self, task_ids: Sequence[TaskId]) -> list[bytes | None]:
        pipe = self._redis.pipeline(transaction=False)
        for task_id in task_ids:
            pipe.hget(self._keys.partial(task_id), "data")
        return list(await pipe.execute())

    async def delete(self, task_ids: Sequence[TaskId]) -> None:
        if task_ids:
            await self._redis.unlink(*(self._keys.partial(task_id) for task_id in task_ids))

    async def sizes(self) -> dict[TaskId, Kept]:
        names = [n async for n in self._redis.scan_iter(match=self._keys.partial("*"), count=1000)]
        pipe = self._redis.pipeline(transaction=False)
        for name in names:
            pipe.hmget(name, "attempt", "tokens")
            pipe.hstrlen(name, "data")
        found = await pipe.execute()
        return {
            TaskId(name.decode().rpartition(":")[2]): Kept(int(attempt), int(tokens), int(size))
            for name, (attempt, tokens), size in zip(names, found[::2], found[1::2], strict=True)
            if attempt is not None
        }


class FilePartials:
    """In the payloads' directory, for runs whose payloads outgrow Redis. The first line of a file has
    attempt, tokens and size; a file that a power cut left incomplete counts as none."""

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

    async def get(self, task_ids: Sequence[TaskId]) -> list[bytes | None]:
        found = await asyncio.to_thread(lambda: [self._read(each) for each in task_ids])
        return [each[1] if each else None for each in found]

    async def delete(self, task_ids: Sequence[TaskId]) -> None:
        await unlink([self._path(task_id) for task_id in task_ids])

    async def sizes(self) -> dict[TaskId, Kept]:
        def read() -> dict[TaskId, Kept]:
            names = [path.stem for path in self._directory.glob("*.partial")]
            return {TaskId(name): found[0] for name in names if (found := self._read(name))}

        return await asyncio.to_thread(read)

    def _path(self, task_id: str) -> Path:
        return self._directory / f"{task_id}.partial"

    def _write(self, partials: Sequence[Partial]) -> None:
        for partial in partials:
            kept = partial.kept
            before = self._read(partial.task_id)
            if before is not None and before[0] > kept:
                continue
            path = self._path(partial.task_id)
            part = path.with_suffix(f".{os.getpid()}.part")
            head = json.dumps([kept.attempt, kept.tokens, kept.size])
            part.write_bytes(head.encode() + b"\n" + partial.data)
            part.replace(path)

    def _read(self, task_id: str) -> tuple[Kept, bytes] | None:
        try:
            head, _, data = self._path(task_id).read_bytes().partition(b"\n")
            kept = Kept(*json.loads(head))
        except (FileNotFoundError, ValueError, TypeError):
            return None
        return (kept, data) if len(data) == kept.size else None


_NOTHING = Kept(0, 0, 0)


class PartialRollouts:
    """Reports that one leader stores and hands out. ``state`` is the ledger's."""

    def __init__(self, store: PartialStore, state: State, *, term: int, limit_bytes: int) -> None:
        self._store = store
        self._state = state
        self._term = term
        self._limit = limit_bytes
        self._sizes: dict[TaskId, Kept] = {}
        """Stored reports by task, as far as this leader knows."""
        self._writing = 0
        """Bytes of reports that are being stored."""
        self._unsure: set[TaskId] = set()
        """Tasks that may have a report: the store did not answer when it was written."""
        self._full = False

    async def begin(self) -> None:
        """Reads the sizes of stored reports, and deletes the reports of finished tasks."""
        try:
            found = await self._store.sizes()
        except (RedisError, OSError):
            return
        for task_id, kept in found.items():
            self._sizes[task_id] = max(kept, self._sizes.get(task_id, kept))
        await self.delete([task_id for task_id in found if not unfinished(self._state, task_id)])

    async def keep(self, partials: Sequence[Partial]) -> list[bool]:
        """Stores reports; False for one that does not fit. Raises NotLeading if the term is over or
        Redis does not answer; the worker then repeats the request."""
        fitting = []
        more = 0
        room = self._limit - self._writing - sum(kept.size for kept in self._sizes.values())
        after: dict[TaskId, Kept] = {}
        for partial in partials:
            task_id = partial.task_id
            kept = after.get(task_id, self._sizes.get(task_id, _NOTHING))
            new = max(kept, partial.kept)
            if more + new.size - kept.size <= room:
                more += new.size - kept.size
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
        # Only now: a report that was not stored must not count towards the limit.
        for partial in fitting:
            kept = self._sizes.get(partial.task_id, _NOTHING)
            self._sizes[partial.task_id] = max(kept, partial.kept)
        self._say_full(
            "" if len(fitting) == len(partials) else "rollout.partial_store_mb is used up"
        )
        # A task may have finished, and its report been deleted, before the report was stored.
        await self.delete([p.task_id for p in fitting if not unfinished(self._state, p.task_id)])
        return [partial in fitting for partial in partials]

    async def of(
        self, leases: Sequence[LeasedTask], limit_bytes: int
    ) -> dict[TaskId, rollout_pb2.PartialGroup]:
        """The usable parts of reports by task, for tasks that are leased again."""
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
            if data is None:
                continue
            part = fresh_part(self._state, rollout_pb2.PartialGroup.FromString(data))
            if part is not None and (limit_bytes := limit_bytes - part.ByteSize()) >= 0:
                usable[task_id] = part
        return usable

    def finished(self, events: Iterable[Event]) -> list[TaskId]:
        """Tasks that these events have finished and that may have a report."""
        done = set()
        for e in events:
            if isinstance(e, GroupAccepted):
                done.add(e.group.task_id)
            elif isinstance(e, TaskDropped | EvalTaskDone):
                done.add(e.task_id)
        return sorted(done & (self._sizes.keys() | self._unsure))

    async def delete(self, task_ids: Sequence[TaskId]) -> None:
        try:
            await self._store.delete(task_ids)
        except (RedisError, OSError) as error:
            # The next leader deletes it.
            event(log, "partial work not deleted", logging.WARNING, why=type(error).__name__)
            return
        for task_id in task_ids:
            self._sizes.pop(task_id, None)
            self._unsure.discard(task_id)

    def _say_full(self, why: str) -> None:
        if why and not self._full:
            event(log, "partial work not kept", logging.WARNING, why=why)
        self._full = bool(why)


def fresh_part(state: State, group: rollout_pb2.PartialGroup) -> rollout_pb2.PartialGroup | None:
    """The group without the tokens of samples that are too stale; None if all of them are."""
    stale = 0
    for completion in group.completions:
        spans = completion.versions
        if spans and not may_continue(
            state,
            TaskId(group.task.task_id),
            Version(spans[0].version),
            Version(spans[-1].version),
        ):
            completion.Clear()
            stale += 1
    if stale:
        event(log, "partial work discarded", task=group.task.task_id, samples=stale, why="stale")
    return group if any(c.versions for c in group.completions) else None
