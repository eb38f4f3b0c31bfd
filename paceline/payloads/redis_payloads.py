"""Payloads in Redis or Valkey: in the journal's server, or spread over several others.

With several servers a payload is in the one that the checksum of its name falls on: every process
that is given the same list of URLs finds it there.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from zlib import crc32

from redis.exceptions import OutOfMemoryError, RedisError

from paceline.masking import masked
from paceline.payloads.store import (
    Payloads,
    Ref,
    Refs,
    StoreFull,
    StoreUnavailable,
    parse_ref,
)
from paceline.payloads.transfer_limits import SLICE_BYTES, Patience, limit_s, slices
from paceline.redis.client import connect, present_url

T = TypeVar("T")
LARGEST = 512 << 20
"""Bytes of the largest value that Redis takes (proto-max-bulk-len)."""
NAMES_AT_ONCE = 512


def payload_key(run_id: str, task_id: str, attempt: int | str) -> str:
    """Name of a payload. The embedded server lets workers use the names of this form, and few
    others."""
    return f"paceline:{run_id}:payload:{task_id}:{attempt}"


@dataclass(eq=False)
class _Server:
    url: str
    writing: Patience = field(default_factory=Patience)
    _found: tuple[str, Any] = ("", None)

    @property
    def client(self) -> Any:
        """Another one once the listener in front of a run's own Redis has moved."""
        if (url := present_url(self.url)) != self._found[0]:
            # Its sockets wait for the largest transfer; each request has a limit by its size.
            self._found = url, connect(url, timeout_s=limit_s(LARGEST))
        return self._found[1]


class RedisPayloads:
    """In the servers of ``urls``."""

    largest = LARGEST

    def __init__(self, urls: Sequence[str], run_id: str) -> None:
        self._run_id = run_id
        self._urls = list(urls)
        self._reading, self._asking = Patience(), Patience()
        self._servers = [_Server(url) for url in urls]

    async def put(self, payloads: Mapping[Ref, bytes]) -> None:
        async def write(server: _Server, refs: Refs) -> None:
            sized = ((ref, len(payloads[ref])) for ref in refs)
            for part in slices(sized, SLICE_BYTES):
                named = {self._key(*ref): payloads[ref] for ref in part}
                async with server.writing.in_time(sum(map(len, named.values()))):
                    await server.client.mset(named)

        await self._on_servers(list(payloads), write)

    async def get(self, refs: Sequence[Ref]) -> Payloads:
        found: dict[Ref, bytes | None] = {}

        async def read(server: _Server, some: Refs) -> None:
            values = await server.client.mget([self._key(*ref) for ref in some])
            found.update(zip(some, values, strict=True))

        await self._on_servers(refs, read)
        return [found[ref] for ref in refs]

    async def stream(self, refs: Sequence[Ref]) -> AsyncIterator[bytes | None]:
        for start in range(0, len(refs), NAMES_AT_ONCE):
            some = refs[start : start + NAMES_AT_ONCE]
            sizes = await self._each(some, lambda pipe, key: pipe.strlen(key))
            sized = ((ref, sizes[ref]) for ref in some)
            for part in slices(sized, SLICE_BYTES * len(self._servers)):
                try:
                    async with self._reading.in_time(sum(sizes[ref] for ref in part)):
                        found = await self.get(part)
                except TimeoutError as error:
                    raise self._unavailable(error) from error
                for data in found:
                    yield data

    async def delete(self, refs: Sequence[Ref]) -> None:
        async def unlink(server: _Server, some: Refs) -> None:
            for start in range(0, len(some), NAMES_AT_ONCE):
                names = [self._key(*ref) for ref in some[start : start + NAMES_AT_ONCE]]
                async with self._asking.in_time(0):
                    await server.client.unlink(*names)

        await self._on_servers(refs, unlink)

    async def list(self) -> Refs:
        pattern = payload_key(self._run_id, "*", "*")
        try:
            return [
                parse_ref(name.decode().rsplit("payload:", 1)[1].replace(":", "-"))
                for server in self._servers
                async for name in server.client.scan_iter(match=pattern, count=1000)
            ]
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from error

    async def missing(self, refs: Sequence[Ref]) -> Refs:
        found = await self._each(refs, lambda pipe, key: pipe.exists(key))
        return [ref for ref in refs if not found[ref]]

    async def close(self) -> None:
        for server in self._servers:
            await server.client.aclose()

    def _key(self, task_id: str, attempt: int) -> str:
        return payload_key(self._run_id, task_id, attempt)

    async def _each(self, refs: Sequence[Ref], ask: Callable[[Any, str], Any]) -> dict[Ref, int]:
        """The number that ``ask`` queues a question for, of each payload."""
        found: dict[Ref, int] = {}

        async def query(server: _Server, some: Refs) -> None:
            for start in range(0, len(some), NAMES_AT_ONCE):
                part = some[start : start + NAMES_AT_ONCE]
                pipe = server.client.pipeline(transaction=False)
                for ref in part:
                    ask(pipe, self._key(*ref))
                async with self._asking.in_time(0):
                    found.update(zip(part, await pipe.execute(), strict=True))

        await self._on_servers(refs, query)
        return found

    async def _on_servers(
        self, refs: Sequence[Ref], act: Callable[[_Server, Refs], Awaitable[None]]
    ) -> None:
        shares: dict[int, Refs] = defaultdict(list)
        for ref in refs:
            number = crc32(f"{ref[0]}-{ref[1]}".encode()) % len(self._servers)
            shares[number].append(ref)
        try:
            await asyncio.gather(*(act(self._servers[n], some) for n, some in shares.items()))
        except (RedisError, OSError) as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: Exception) -> StoreUnavailable:
        if isinstance(error, StoreUnavailable):
            return error
        where = ", ".join(map(masked, self._urls))
        if isinstance(error, OutOfMemoryError) or "OOM " in str(error):
            return StoreFull(
                f"the payload store at {where} is full: give it more memory (maxmemory; "
                "redis.maxmemory_mb of the run's own server), or name other stores in payloads.url"
            )
        why = str(error) or type(error).__name__
        return StoreUnavailable(f"the payload store at {where} does not answer: {why}")
