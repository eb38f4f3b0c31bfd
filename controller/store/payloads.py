"""Payload stores: the tokens of accepted groups, kept until a checkpoint covers them.

A payload is the serialised ``Group`` message as the worker sent it, under (task id, attempt). It is
stored before the event that accepts it, so an accepted group always has one. The payload of a group
that was not accepted is overwritten by the next attempt or deleted with its task.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from controller.store.bulk_transfer import SLICE_BYTES, in_time
from controller.store.redis_keys import Keys
from paceline.byte_slices import slices
from paceline.durable_files import make_directory, sync_directory, write_durably
from paceline.ids import TaskId

Ref = tuple[TaskId, int]
"""(task id, attempt)."""
Refs = list[Ref]
Payloads = list[bytes | None]


class PayloadStore(Protocol):
    """Payloads of one run, by (task id, attempt)."""

    async def put(self, payloads: Mapping[Ref, bytes], pipe: Any) -> Sequence[str]:
        """Stores payloads, or queues their storing in the journal's pipeline ``pipe``.

        Returns the Redis keys whose existence the append has to check.
        """
        ...

    async def get(self, refs: Sequence[Ref]) -> Payloads:
        """In the order of ``refs``; None for an unknown one. For a few of them: see ``stream``."""
        ...

    def stream(self, refs: Sequence[Ref]) -> AsyncIterator[bytes | None]:
        """The same, a slice of bounded size at a time."""
        ...

    async def delete(self, refs: Sequence[Ref]) -> None:
        """Deletes payloads; unknown ones are no error."""
        ...

    async def list(self) -> Refs:
        """All stored payloads."""
        ...


class RedisPayloads:
    """In the run's Redis, in the same round trip as the journal entry."""

    def __init__(self, redis: Any, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys

    async def put(self, payloads: Mapping[Ref, bytes], pipe: Any) -> Sequence[str]:
        named = {self._keys.payload(*ref): data for ref, data in payloads.items()}
        if named:
            pipe.mset(named)
        return list(named)

    async def get(self, refs: Sequence[Ref]) -> Payloads:
        if not refs:
            return []
        found: Payloads = await self._redis.mget([self._keys.payload(*r) for r in refs])
        return found

    async def stream(self, refs: Sequence[Ref]) -> AsyncIterator[bytes | None]:
        for start in range(0, len(refs), 512):
            some = refs[start : start + 512]
            pipe = self._redis.pipeline(transaction=False)
            for ref in some:
                pipe.strlen(self._keys.payload(*ref))
            async with in_time(0):
                sizes = await pipe.execute()
            for part in slices(zip(zip(some, sizes, strict=True), sizes, strict=True), SLICE_BYTES):
                async with in_time(sum(size for _, size in part)):
                    found = await self.get([ref for ref, _ in part])
                for data in found:
                    yield data

    async def delete(self, refs: Sequence[Ref]) -> None:
        for start in range(0, len(refs), 512):
            names = [self._keys.payload(*ref) for ref in refs[start : start + 512]]
            await self._redis.unlink(*names)

    async def list(self) -> Refs:
        pattern = self._keys.payload("*", 0)[:-1] + "*"
        return [
            parse_ref(name.decode().rsplit("payload:", 1)[1].replace(":", "-"))
            async for name in self._redis.scan_iter(match=pattern, count=1000)
        ]


class FilePayloads:
    """In a directory that every controller sees, for runs whose payloads outgrow Redis' memory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        make_directory(directory)

    async def put(self, payloads: Mapping[Ref, bytes], pipe: Any) -> Sequence[str]:
        if payloads:
            await asyncio.to_thread(self._write, dict(payloads))
        return []

    async def get(self, refs: Sequence[Ref]) -> Payloads:
        return await asyncio.to_thread(lambda: [self._read(ref) for ref in refs])

    async def stream(self, refs: Sequence[Ref]) -> AsyncIterator[bytes | None]:
        for ref in refs:
            yield await asyncio.to_thread(self._read, ref)

    async def delete(self, refs: Sequence[Ref]) -> None:
        await unlink([self._path(ref) for ref in refs])

    def has(self, ref: Ref) -> bool:
        return self._path(ref).exists()

    def _path(self, ref: Ref) -> Path:
        # Task ids were checked at admission: letters, digits and dots only.
        return self._directory / f"{ref[0]}-{ref[1]}.group"

    def _write(self, payloads: Mapping[Ref, bytes]) -> None:
        for ref, data in payloads.items():
            path = self._path(ref)
            partial = path.with_suffix(f".{os.getpid()}.part")
            write_durably(partial, data)
            # Atomic: a reader never sees an incomplete payload.
            partial.replace(path)
        # The event that accepts them follows: after a power cut they must be there if it is.
        sync_directory(self._directory)

    def _read(self, ref: Ref) -> bytes | None:
        try:
            return self._path(ref).read_bytes()
        except FileNotFoundError:
            return None

    async def list(self) -> Refs:
        return await asyncio.to_thread(
            lambda: [parse_ref(path.stem) for path in self._directory.glob("*.group")]
        )


def parse_ref(text: str) -> Ref:
    """Inverse of ``f"{task_id}-{attempt}"``."""
    task_id, _, attempt = text.rpartition("-")
    return TaskId(task_id), int(attempt)


async def unlink(paths: Sequence[Path]) -> None:
    """Deletes files; missing ones are no error."""

    def remove() -> None:
        for path in paths:
            path.unlink(missing_ok=True)

    await asyncio.to_thread(remove)
