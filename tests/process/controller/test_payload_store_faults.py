"""A payload store of its own that is killed, stops, is full, slow or cut off, loses payloads or
returns other bytes; and payloads that would take too long in one piece."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from controller.store.journal_audit import verify
from controller.store.redis_keys import Keys
from paceline.ids import TaskId
from paceline.payloads import transfer_limits
from paceline.payloads.redis_payloads import RedisPayloads
from paceline.payloads.store import Ref, StoreUnavailable
from paceline.payloads.transfer_limits import SLICE_BYTES
from paceline.redis.client import connect_sync
from paceline.rpc.addresses import free_ports
from testbed.faults.tcp_proxy import TcpProxy
from testbed.fleets.controllers import (
    assert_sound,
    running_controllers,
    status,
    until,
    working_fleet,
)
from testbed.redis.external_redis import Server
from testbed.redis.redis_process import throwaway_redis


@contextmanager
def payload_server(directory: Path) -> Iterator[Server]:
    (port,) = free_ports("127.0.0.1", 1)
    server = Server(directory, "payloads", port, "appendonly yes", 'save ""')
    try:
        yield server
    finally:
        server.kill()


def killed(server: Server) -> None:
    server.kill()


def stopped(server: Server) -> None:
    os.kill(server.process.pid, signal.SIGSTOP)


def full(server: Server) -> None:
    server.client.config_set("maxmemory", "1")


def mended(server: Server) -> None:
    if server.process.poll() is not None:
        server.start()
    os.kill(server.process.pid, signal.SIGCONT)
    server.client.config_set("maxmemory", "0")


def lost(server: Server) -> None:
    server.client.flushall()


def lying(server: Server) -> None:
    for key in server.client.scan_iter("paceline:*:payload:*"):
        server.client.set(key, b"other bytes", xx=True)


@pytest.mark.parametrize("fail", [killed, stopped, full])
async def test_a_payload_store_that_is_away_delays_the_run_and_fails_nothing(
    tmp_path: Path, fail: object
) -> None:
    with payload_server(tmp_path) as server:
        config = {"payloads": {"url": server.url}}
        with running_controllers(tmp_path, 1, **config) as controllers:
            async with working_fleet(controllers) as (policies, rollouts):
                policies[0].fetch = True
                await until(lambda: policies[0].timings.steps >= 3)
                fail(server)  # type: ignore[operator]
                waiting = sum(w.timings.errors for w in rollouts)
                if fail is not stopped:
                    await until(lambda: sum(w.timings.errors for w in rollouts) > waiting + 1)
                else:
                    # Nothing is to happen: there is no event to wait for.
                    await asyncio.sleep(1.0)
                assert (await status(policies[0].control)).phase == "running"
                mended(server)
                done = policies[0].timings.steps
                await until(lambda: policies[0].timings.steps >= done + 3)
                assert [w.rejoins for w in (*policies, *rollouts)] == [0, 0, 0]
            assert assert_sound(controllers.redis_url)["dropped"] == {}


async def test_a_slow_payload_store_slows_the_run_and_fails_nothing(tmp_path: Path) -> None:
    """Each answer takes longer than a heartbeat, and a payload many times as long as it usually
    does."""
    with payload_server(tmp_path) as server, TcpProxy(("127.0.0.1", server.port)) as proxy:
        config = {"payloads": {"url": f"redis://{proxy.address}/0"}}
        with running_controllers(tmp_path, 1, **config) as controllers:
            async with working_fleet(controllers) as (policies, rollouts):
                policies[0].fetch = True
                await until(lambda: policies[0].timings.steps >= 2)
                # Even a small request runs out of its usual time, which is 2 s.
                proxy.delay_s, proxy.bytes_per_s = 1.1, 20_000.0
                slow = policies[0].timings.steps
                await until(lambda: policies[0].timings.steps >= slow + 2, 240.0)
                proxy.delay_s = proxy.bytes_per_s = 0.0
                proxy.partition()
                waiting = policies[0].timings.steps
                await asyncio.sleep(1.0)  # nothing is to happen: there is no event to wait for
                assert policies[0].timings.steps <= waiting + 1
                proxy.heal()
                await until(lambda: policies[0].timings.steps >= waiting + 3)
                assert (await status(policies[0].control)).phase == "running"
                assert [w.rejoins for w in (*policies, *rollouts)] == [0, 0, 0]
            assert assert_sound(controllers.redis_url)["dropped"] == {}


@pytest.mark.parametrize("fail", [lost, lying])
async def test_groups_that_the_store_has_lost_or_changed_are_generated_again(
    tmp_path: Path, fail: object
) -> None:
    with payload_server(tmp_path) as server:
        config = {"payloads": {"url": server.url}, "train": {"max_staleness": 4}}
        with running_controllers(tmp_path, 1, **config) as controllers:
            async with working_fleet(controllers) as (policies, _):
                policy = policies[0]
                policy.fetch = True
                await until(lambda: policy.timings.steps >= 3)

                async def some_lost() -> bool:
                    """Until a group was struck between its acceptance and its reading."""
                    fail(server)  # type: ignore[operator]
                    with connect_sync(controllers.redis_url) as journal:
                        entries = journal.xrevrange(Keys("load").journal, count=200)
                    return any(b'"GroupLost"' in fields[b"e"] for _, fields in entries)

                await until(some_lost)
                done = policy.timings.steps
                await until(lambda: policy.timings.steps >= done + 3)
                assert (await status(policy.control)).phase == "running"
            counts = verify(controllers.redis_url, "load").counts
            assert counts["lost"] == counts["duplicates"] == 0


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
    found._servers[0]._found = urls[0], Narrow(found._servers[0].client, 16 * MIB)
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
