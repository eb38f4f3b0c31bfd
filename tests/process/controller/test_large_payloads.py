"""Payloads that would take too long in one piece: split by bytes, with limits that grow with the
size."""

from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytest

from paceline.ids import TaskId
from paceline.payloads import transfer_limits
from paceline.payloads.redis_payloads import RedisPayloads
from paceline.payloads.store import Ref, StoreUnavailable
from paceline.payloads.transfer_limits import SLICE_BYTES
from testbed.faults.tcp_proxy import TcpProxy
from testbed.redis.redis_process import throwaway_redis

MIB = 1 << 20


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    first, second = (tmp_path_factory.mktemp(name) for name in ("first", "second"))
    with throwaway_redis(first) as one, throwaway_redis(second) as other:
        yield [one, other]


class Narrow:
    """A client whose requests time out if they carry more than Redis takes in 2 s."""

    def __init__(self, redis: Any, most: int) -> None:
        self._redis = redis
        self.most = most
        self.sent: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._redis, name)

    async def mset(self, named: dict[str, bytes]) -> None:
        size = sum(map(len, named.values()))
        self.sent.append(size)
        if size > self.most:
            raise TimeoutError(f"{size} bytes")
        await self._redis.mset(named)


@pytest.fixture
async def store(urls: list[str]) -> AsyncIterator[RedisPayloads]:
    found = RedisPayloads(urls[:1], "r")
    await found._servers[0].client.flushdb()
    found._servers[0].client = Narrow(found._servers[0].client, 16 * MIB)
    yield found
    await found.close()


def payloads(count: int, size: int) -> dict[Ref, bytes]:
    return {(TaskId(f"t{n}"), 1): bytes([n]) * size for n in range(count)}


async def test_many_payloads_land_although_no_large_request_would(store: RedisPayloads) -> None:
    groups = payloads(40, MIB)
    await store.put(groups)
    sent = store._servers[0].client.sent
    assert max(sent) <= SLICE_BYTES and sum(sent) == 40 * MIB, "each once"
    found = [data async for data in store.stream([*groups, (TaskId("t99"), 1)])]
    assert found == [*groups.values(), None]
    assert await store.missing([*groups, (TaskId("t99"), 1)]) == [("t99", 1)]


async def test_payloads_are_spread_over_several_servers(urls: list[str]) -> None:
    both = RedisPayloads(urls, "spread")
    groups = payloads(64, 100)
    await both.put(groups)
    counts = [await server.client.dbsize() for server in both._servers]
    assert min(counts) >= 16
    reader = RedisPayloads(urls, "spread")
    assert [data async for data in reader.stream(list(groups))] == list(groups.values())
    assert sorted(await reader.list()) == sorted(groups)
    some = list(groups)[:40]
    await reader.delete(some)
    assert await both.missing(list(groups)) == some
    await both.close()
    await reader.close()


async def test_a_store_that_answers_at_once_and_sends_slowly_is_read_in_the_end(
    urls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question for the sizes is quick each time: it must not shorten the time for the
    payload."""
    monkeypatch.setattr(transfer_limits, "ANSWER_S", 0.2)
    ref, payload = (TaskId("slow"), 1), b"x" * MIB
    near = RedisPayloads(urls[:1], "run")
    await near.put({ref: payload})
    parts = urlsplit(urls[0])
    with TcpProxy((parts.hostname, parts.port) if parts.port else parts.path) as proxy:
        login = parts.netloc.rpartition("@")[0]
        place = f"{login}@{proxy.address}" if login else proxy.address
        store = RedisPayloads([f"redis://{place}/0"], "run")
        proxy.bytes_per_s = 700_000.0  # takes 1.5 s, where 0.5 s are usual
        tries = 0
        while True:
            tries += 1
            assert tries < 10, "the same limit, for ever"
            with suppress(StoreUnavailable):
                assert [data async for data in store.stream([ref])] == [payload]
                break
        assert tries > 1
        await store.close()
    await near.close()
