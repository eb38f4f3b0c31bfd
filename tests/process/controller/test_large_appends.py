"""Appends that would take too long in one piece: split by bytes, with limits that grow with the size."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from controller.ledger.events import Paused
from controller.store import bulk_transfer
from controller.store.bulk_transfer import SLICE_BYTES, limit_s
from controller.store.group_commit import GroupCommit
from controller.store.journal import Journal, Position
from controller.store.payloads import RedisPayloads, Ref
from controller.store.redis_keys import Keys
from paceline.byte_slices import slices
from paceline.redis.client import connect
from testbed.redis.redis_process import throwaway_redis

KEYS = Keys("r")
MIB = 1 << 20


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with throwaway_redis(tmp_path_factory.mktemp("redis")) as found:
        yield found


class SlowRedis:
    """A client whose pipelines time out if they carry more than Redis takes in 2 s."""

    def __init__(self, redis: Any, most: int) -> None:
        self._redis = redis
        self.most = most
        self.sent: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._redis, name)

    def pipeline(self, **options: Any) -> Any:
        pipe = self._redis.pipeline(**options)
        execute = pipe.execute

        async def bounded(**how: Any) -> Any:
            size = sum(len(x) for c in pipe.command_stack for x in c[0] if isinstance(x, bytes))
            self.sent.append(size)
            if size > self.most:
                raise TimeoutError(f"{size} bytes")
            return await execute(**how)

        pipe.execute = bounded
        return pipe


@pytest.fixture
async def slow(url: str) -> AsyncIterator[SlowRedis]:
    client = connect(url)
    await client.flushdb()
    await client.set(KEYS.term, "5")
    yield SlowRedis(client, 16 * MIB)
    await client.aclose()


def committing(slow: SlowRedis) -> GroupCommit:
    journal = Journal(slow, KEYS, RedisPayloads(slow, KEYS))
    return GroupCommit(
        journal, term=5, at=Position(), on_flush=lambda b: None, on_durable=lambda b: None
    )


def payloads(count: int, size: int) -> dict[Ref, bytes]:
    return {(f"t{n}", 1): bytes([n]) * size for n in range(count)}  # type: ignore[misc]


async def flush(commit: GroupCommit, groups: dict[Ref, bytes]) -> None:
    running = asyncio.create_task(commit.run())
    for ref, data in groups.items():
        commit.add_payload(ref, data)
    commit.add([Paused("r", True)])
    try:
        async with asyncio.timeout(60):
            await commit.durable()
    finally:
        running.cancel()


async def test_one_flush_of_many_payloads_lands_although_no_large_request_would(
    slow: SlowRedis,
) -> None:
    groups = payloads(40, MIB)
    await flush(committing(slow), groups)
    assert max(slow.sent) <= SLICE_BYTES and sum(slow.sent) < 41 * MIB, "each once"
    stored = RedisPayloads(slow, KEYS)
    found = [data async for data in stored.stream([*groups, ("t99", 1)])]
    assert found == [*groups.values(), None]


async def test_a_repeated_append_goes_on_after_the_slices_that_are_stored(
    slow: SlowRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, calls = RedisPayloads.put, 0

    async def fails_once(self: Any, groups: Any, pipe: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise ConnectionError("Redis is away for a moment")
        return await put(self, groups, pipe)

    monkeypatch.setattr(RedisPayloads, "put", fails_once)
    await flush(committing(slow), payloads(40, MIB))
    assert sum(slow.sent) < 41 * MIB, "what was stored is not sent again"


async def test_payloads_that_vanished_are_sent_again(slow: SlowRedis) -> None:
    """Redis has lost the slices that were stored, as a failover can."""
    commit = committing(slow)
    store = commit._journal._store

    async def and_lose(*args: Any) -> Any:
        last = await store(*args)
        commit._journal._store = store  # type: ignore[method-assign]
        await slow.unlink(KEYS.payload("t0", 1))
        return last

    commit._journal._store = and_lose  # type: ignore[method-assign]
    groups = payloads(20, MIB)
    await flush(commit, groups)
    assert await RedisPayloads(slow, KEYS).get(list(groups)) == list(groups.values())


def test_time_limits_grow_with_the_size() -> None:
    assert limit_s(0) == bulk_transfer.ANSWER_S
    assert limit_s(64 * MIB) > 16


def test_slices_are_bounded_and_keep_the_order() -> None:
    assert list(slices([("a", 3), ("b", 3), ("c", 9), ("d", 1)], 6)) == [["a", "b"], ["c"], ["d"]]
