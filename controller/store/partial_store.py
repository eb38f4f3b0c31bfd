"""Partial stores: the reports of a running task as chunks, each appended to those before it.

A chunk holds the tokens after the first ``offset`` ones of an attempt, over all its completions. It
is stored if it is whole (offset 0) and newer, or if exactly ``offset`` tokens of its attempt are
held. A chunk that comes twice, late or after a gap changes nothing, and the answer says what is
held.

T tokens of a completion, reported every N: 8 T bytes are written, and T / N chunks are read for the
next lease.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from controller.store.lua_scripts import Script
from controller.store.redis_keys import Keys
from paceline.ids import TaskId
from paceline.payloads.file_payloads import unlink

# KEYS: term, one for each chunk. ARGV: term, then attempt, offset, tokens and data of each chunk.
# The answer: attempt, tokens and size held of each, or nothing if a higher term was granted.
_PUT = Script("""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {} end
local held = {}
for i = 2, #KEYS do
  local at = 4 * i - 6
  local attempt, offset = tonumber(ARGV[at]), tonumber(ARGV[at + 1])
  local tokens, data = tonumber(ARGV[at + 2]), ARGV[at + 3]
  local found = redis.call('HMGET', KEYS[i], 'attempt', 'tokens', 'size')
  local before, has = tonumber(found[1] or 0), tonumber(found[2] or 0)
  local size = tonumber(found[3] or 0)
  local newer = attempt > before or (attempt == before and tokens > has)
  local whole, next = offset == 0 and newer, attempt == before and offset == has
  if whole then
    redis.call('DEL', KEYS[i])
    size = 0
  end
  if whole or next then
    before, has, size = attempt, tokens, size + #data
    redis.call('HSET', KEYS[i], 'attempt', before, 'tokens', has, 'size', size)
    redis.call('HSET', KEYS[i], 'c' .. redis.call('HLEN', KEYS[i]), data)
  end
  held[#held + 1], held[#held + 2], held[#held + 3] = before, has, size
end
return held
""")


@dataclass(frozen=True, order=True, slots=True)
class Kept:
    """What is held of one task. A greater one (attempt, tokens) replaces a smaller one."""

    attempt: int = 0
    tokens: int = 0
    size: int = field(default=0, compare=False)
    """Bytes."""


NOTHING = Kept()


@dataclass(frozen=True, slots=True)
class Partial:
    """One chunk that has passed validation."""

    task_id: TaskId
    attempt: int
    tokens: int
    """Of the attempt with this chunk, over all completions."""
    data: bytes
    """The serialised PartialGroup."""
    offset: int = 0

    def after(self, kept: Kept) -> Kept:
        """What is held once this chunk came, if ``kept`` was; the same if it is not stored."""
        if self.offset == 0 and (self.attempt, self.tokens) > (kept.attempt, kept.tokens):
            return Kept(self.attempt, self.tokens, len(self.data))
        if (self.attempt, self.offset) == (kept.attempt, kept.tokens):
            return Kept(self.attempt, self.tokens, kept.size + len(self.data))
        return kept


class PartialStore(Protocol):
    async def put(self, term: int, partials: Sequence[Partial]) -> list[Kept] | None:
        """Stores chunks; what is held of each task then. None, and nothing stored, if a higher term
        was granted."""
        ...

    async def get(self, task_ids: Sequence[TaskId]) -> list[list[bytes]]:
        """The chunks of each task, oldest first; empty if there are none."""
        ...

    async def delete(self, task_ids: Sequence[TaskId]) -> None: ...

    async def sizes(self) -> dict[TaskId, Kept]: ...


class RedisPartials:
    def __init__(self, redis: Any, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    async def put(self, term: int, partials: Sequence[Partial]) -> list[Kept] | None:
        keys = [self._keys.term, *(self._keys.partial(p.task_id) for p in partials)]
        arguments: list[Any] = [str(term)]
        for p in partials:
            arguments += [p.attempt, p.offset, p.tokens, p.data]
        held = await _PUT.run(self._redis, keys, arguments)
        if not held:
            return None
        return [Kept(*held[i : i + 3]) for i in range(0, len(held), 3)]

    async def get(self, task_ids: Sequence[TaskId]) -> list[list[bytes]]:
        pipe = self._redis.pipeline(transaction=False)
        for task_id in task_ids:
            pipe.hgetall(self._keys.partial(task_id))
        return [_in_order(found) for found in await pipe.execute()]

    async def delete(self, task_ids: Sequence[TaskId]) -> None:
        if task_ids:
            await self._redis.unlink(*(self._keys.partial(task_id) for task_id in task_ids))

    async def sizes(self) -> dict[TaskId, Kept]:
        names = [n async for n in self._redis.scan_iter(match=self._keys.partial("*"), count=1000)]
        pipe = self._redis.pipeline(transaction=False)
        for name in names:
            pipe.hmget(name, "attempt", "tokens", "size")
        found = await pipe.execute()
        return {
            TaskId(name.decode().rpartition(":")[2]): Kept(*(int(value) for value in values))
            for name, values in zip(names, found, strict=True)
            if None not in values
        }


def _in_order(found: dict[bytes, bytes]) -> list[bytes]:
    chunks = [(int(name[1:]), data) for name, data in found.items() if name[1:].isdigit()]
    return [data for _, data in sorted(chunks)]


class FilePartials:
    """In the payloads' directory, for runs whose payloads outgrow Redis: a file for each task. Each
    chunk has a line with attempt, offset, tokens and size before it. A file that a power cut left
    incomplete counts as none."""

    def __init__(self, directory: Path, is_term: Any) -> None:
        """``is_term(term)``: awaitable; whether it is the highest granted."""
        self._directory = directory
        self._is_term = is_term
        self._writing = asyncio.Lock()
        self._known: dict[TaskId, tuple[Kept, int]] = {}
        """What is held, and the size of the file when this process wrote it: it is not read for
        each chunk."""

    async def put(self, term: int, partials: Sequence[Partial]) -> list[Kept] | None:
        if not await self._is_term(term):
            return None
        async with self._writing:
            return await asyncio.to_thread(lambda: [self._write(p) for p in partials])

    async def get(self, task_ids: Sequence[TaskId]) -> list[list[bytes]]:
        return await asyncio.to_thread(lambda: [self._read(each)[1] for each in task_ids])

    async def delete(self, task_ids: Sequence[TaskId]) -> None:
        async with self._writing:
            await asyncio.to_thread(unlink, [self._path(task_id) for task_id in task_ids])
            for task_id in task_ids:
                self._known.pop(task_id, None)

    async def sizes(self) -> dict[TaskId, Kept]:
        def read() -> dict[TaskId, Kept]:
            names = [TaskId(path.stem) for path in self._directory.glob("*.partial")]
            return {name: kept for name in names if (kept := self._read(name)[0]) != NOTHING}

        return await asyncio.to_thread(read)

    def _path(self, task_id: str) -> Path:
        return self._directory / f"{task_id}.partial"

    def _write(self, partial: Partial) -> Kept:
        path = self._path(partial.task_id)
        kept = self._held(partial.task_id)
        after = partial.after(kept)
        if after is kept:
            return kept
        line = json.dumps([partial.attempt, partial.offset, partial.tokens, len(partial.data)])
        chunk = line.encode() + b"\n" + partial.data
        if partial.offset == 0:
            part = path.with_suffix(f".{os.getpid()}.part")
            part.write_bytes(chunk)
            part.replace(path)
        else:
            with path.open("ab") as file:
                file.write(chunk)
        self._known[partial.task_id] = after, path.stat().st_size
        return after

    def _held(self, task_id: TaskId) -> Kept:
        kept, size = self._known.get(task_id, (NOTHING, -1))
        try:
            # Another leader may have written to it since.
            return kept if self._path(task_id).stat().st_size == size else self._read(task_id)[0]
        except FileNotFoundError:
            return NOTHING

    def _read(self, task_id: str) -> tuple[Kept, list[bytes]]:
        try:
            data = self._path(task_id).read_bytes()
        except FileNotFoundError:
            return NOTHING, []
        kept, chunks, at = NOTHING, list[bytes](), 0
        while at < len(data):
            start = data.find(b"\n", at) + 1
            try:
                attempt, offset, tokens, size = json.loads(data[at:start])
            except (ValueError, TypeError):
                return NOTHING, []
            at = start + size
            if at > len(data):
                return NOTHING, []
            chunks.append(data[start:at])
            kept = Partial(TaskId(task_id), attempt, tokens, chunks[-1], offset).after(kept)
        return kept, chunks
