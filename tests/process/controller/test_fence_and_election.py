"""Two leaders never write: the fence on appends, the rising term, the lease."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import OutOfMemoryError, RedisError

from controller.store import snapshot_json
from controller.store.election import Election
from controller.store.journal import Deposed, Journal, JournalGap, LedgerSnapshot, Position
from controller.store.redis_keys import Keys
from paceline.errors import BadInput
from paceline.redis.client import (
    UNWRITABLE,
    connect,
    connect_sync,
    parse_sentinel,
    remedy_of,
    trouble_of,
)
from paceline.redis.leader_lease import LeaderIdentity, living_leader, release_dead
from paceline_launcher.launch.run_dir import check_no_leader, clear
from testbed.fleets.controllers import until
from testbed.redis.full_redis import full_redis
from tests.fixtures.configs import config_of

KEYS = Keys("r")


@pytest.fixture
async def redis(url: str) -> Any:
    client = connect(url)
    await client.flushdb()
    yield client
    await client.aclose()


def candidate(redis: Any, name: str, lease_s: float = 5.0) -> Election:
    identity = LeaderIdentity(name, f"{name}:1", socket.gethostname(), os.getpid(), name)
    return Election(redis, KEYS, identity, lease_s=lease_s)


async def granted(election: Election, known_term: int = 0) -> int:
    """The term that ``election`` wins."""
    term = await election.acquire(known_term)
    assert term is not None
    return term


def journal(redis: Any) -> Journal:
    return Journal(redis, KEYS)


async def append(j: Journal, after: Position, term: int, batch: str, **extra: Any) -> Position:
    events = extra.pop("events", [{"type": batch}])
    return await j.append(after, term=term, batch=batch, t=1.0, events=events)


async def test_deposed_leader_cannot_append(redis: Any) -> None:
    old, new, j = candidate(redis, "a"), candidate(redis, "b"), journal(redis)
    first = await granted(old)
    at = await append(j, Position(), first, "one")
    await old.release()
    second = await granted(new)
    assert second > first
    with pytest.raises(Deposed):
        await append(j, at, first, "two")
    assert not await old.renew(first)
    assert (await j.head()) == at


async def test_a_lease_does_not_outlive_its_leader_after_redis_clock_was_set_back(
    redis: Any,
) -> None:
    dead, next_one = candidate(redis, "a"), candidate(redis, "b", lease_s=0.2)
    term = await granted(dead)
    await redis.pexpire(KEYS.leader, 3_600_000)  # as after `date -s` an hour back
    terms: list[int | None] = []

    async def takes_over() -> bool:
        terms.append(await next_one.acquire(term))
        return terms[-1] is not None

    await until(takes_over)
    assert terms[0] is None, "it may be alive: it has its time to renew"
    assert terms[-1] is not None and terms[-1] > term


async def test_unacknowledged_append_that_landed_is_not_applied_twice(redis: Any) -> None:
    j = journal(redis)
    term = await granted(candidate(redis, "a"))
    first = await append(j, Position(), term, "one")
    again = await append(j, Position(), term, "one")
    assert again == first
    assert len(await j.read(Position())) == 1


async def test_append_after_what_the_writer_does_not_know_is_refused(redis: Any) -> None:
    """A Sentinel failover may lose the journal's tail: a leader ahead of it must not go on."""
    j = journal(redis)
    term = await granted(candidate(redis, "a"))
    await append(j, Position(), term, "one")
    with pytest.raises(Deposed):
        await append(j, Position("9-9", 7, "lost"), term, "two")


async def test_term_never_repeats_where_the_counter_stepped_back(redis: Any) -> None:
    first = await granted(candidate(redis, "a"))
    await redis.set(KEYS.term, str(first - 1))
    await redis.delete(KEYS.leader)
    await asyncio.sleep(0.005)
    # A candidate that never heard of the first term either.
    second = await granted(candidate(redis, "b"))
    assert second > first


async def expired(redis: Any) -> None:
    """Returns once the leader's lease has run out in Redis."""

    async def gone() -> bool:
        return not await redis.exists(KEYS.leader)

    await until(gone)


async def test_a_lease_is_one_candidates_until_it_runs_out(redis: Any) -> None:
    a, b = candidate(redis, "a", lease_s=0.2), candidate(redis, "b")
    term = await granted(a)
    assert await b.acquire(0) is None
    assert await a.renew(term) and a.holds_lease
    await expired(redis)
    await until(lambda: not a.holds_lease)
    assert await a.renew(term), "nobody else was granted a term"
    await expired(redis)
    assert await b.acquire(0) is not None
    assert not await a.renew(term)


async def test_only_the_lease_of_the_process_that_died_is_released(redis: Any, url: str) -> None:
    a = candidate(redis, "a")
    await a.acquire(0)
    for controller_id, pid in (("b", os.getpid()), ("a", os.getpid() + 1)):
        assert not await asyncio.to_thread(release_dead, url, "r", controller_id, pid)
    assert (await a.holder())[0] is not None
    assert await asyncio.to_thread(release_dead, url, "r", "a", os.getpid())
    assert (await a.holder())[0] is None


async def test_a_reader_notices_that_it_was_trimmed_off(redis: Any) -> None:
    j = journal(redis)
    term = await granted(candidate(redis, "a"))
    at = first = await append(j, Position(), term, "b0")
    for number in range(1, 6):
        at = await append(j, at, term, f"b{number}")
    await j.save_snapshot(LedgerSnapshot(at, {}, 1.0), term=term, trim_before=at.entry)
    with pytest.raises(JournalGap):
        await j.read(first)
    assert (await j.load_snapshot()) == LedgerSnapshot(at, {}, 1.0)
    with pytest.raises(Deposed):
        await j.save_snapshot(LedgerSnapshot(at, {}, 2.0), term=term - 1, trim_before="")
    lost = await append(j, at, term, "b6")
    await redis.xdel(KEYS.journal, lost.entry)  # as by a failover of Redis
    with pytest.raises(Deposed):
        await j.save_snapshot(LedgerSnapshot(lost, {}, 3.0), term=term, trim_before="")
    assert (await j.load_snapshot()) == LedgerSnapshot(at, {}, 1.0)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A state whose snapshot has many pieces."""
    monkeypatch.setattr(snapshot_json, "PIECE", 64)
    return {f"name-{n}": list(range(n)) for n in range(50)}


async def test_a_snapshot_in_pieces_replaces_the_one_before_whole(
    redis: Any, small_pieces: dict[str, Any]
) -> None:
    term, at = await candidate(redis, "a").acquire(0), Position()
    j = journal(redis)
    for t in 1.0, 2.0:
        at = await append(j, at, term, f"b{t}")
        await j.save_snapshot(LedgerSnapshot(at, small_pieces, t), term=term, trim_before="")
        found = await journal(redis).load_snapshot()
        assert found is not None and (found.at, found.state, found.t) == (at, small_pieces, t)
        assert await redis.ttl(KEYS.snapshot) == -1, "it does not expire"
        assert await redis.keys(f"{KEYS.snapshot}:*") == []


async def test_a_deposed_leader_leaves_a_staged_snapshot_that_expires(
    redis: Any, small_pieces: dict[str, Any]
) -> None:
    term = await candidate(redis, "a").acquire(0)
    j = journal(redis)
    at = await append(j, Position(), term, "b")
    await j.save_snapshot(LedgerSnapshot(at, {}, 1.0), term=term, trim_before="")
    with pytest.raises(Deposed):
        await j.save_snapshot(LedgerSnapshot(at, small_pieces, 2.0), term=0, trim_before="")
    found = await j.load_snapshot()
    assert found is not None and found.t == 1.0
    (staged,) = await redis.keys(f"{KEYS.snapshot}:*")
    assert 0 < await redis.ttl(staged) <= 600


async def test_a_snapshot_whose_pieces_were_lost_is_not_taken(
    redis: Any, small_pieces: dict[str, Any]
) -> None:
    """As where a replica without them took over from Redis in between."""
    term = await candidate(redis, "a").acquire(0)

    class Failing(Journal):
        async def _stage_snapshot(self, staged: str, offset: int, piece: str) -> None:
            await super()._stage_snapshot(staged, offset, piece)
            await super()._stage_snapshot(staged, offset, piece)  # the answer was lost
            if offset > 1000:
                await redis.delete(KEYS.staged_snapshot(staged))

    j = Failing(redis, KEYS)
    at = await append(j, Position(), term, "b")
    with pytest.raises(ConnectionError, match="staged snapshot is gone"):
        await j.save_snapshot(LedgerSnapshot(at, small_pieces, 1.0), term=term, trim_before="")
    assert await j.load_snapshot() is None


def test_sentinel_urls_are_understood() -> None:
    url = parse_sentinel("redis+sentinel://:s%40crt@h1:26379,h2/mymaster/3")
    assert url is not None
    assert url.sentinels == (("h1", 26379), ("h2", 26379))
    assert (url.service, url.db, url.password, url.tls) == ("mymaster", 3, "s@crt", False)
    assert parse_sentinel("redis://h:1") is None


@contextlib.asynccontextmanager
async def leading(redis: Any, name: str) -> AsyncIterator[None]:
    """A leader that renews its lease, as a process would."""
    election = candidate(redis, name, lease_s=0.4)
    term = await granted(election)

    async def renew() -> None:
        while True:
            await asyncio.sleep(0.1)
            await election.renew(term)

    renewing = asyncio.create_task(renew())
    try:
        yield
    finally:
        renewing.cancel()


async def test_a_lease_of_a_dead_leader_is_nobodys_and_a_renewed_one_is_somebodys(
    redis: Any, url: str
) -> None:
    assert await asyncio.to_thread(living_leader, url, "r") is None
    async with leading(redis, "a"):
        found = await asyncio.to_thread(living_leader, url, "r")
        assert found is not None
        assert found.controller_id == "a"
    assert await redis.exists(KEYS.leader), "left behind, not yet run out"
    assert await asyncio.to_thread(living_leader, url, "r") is None


async def test_a_second_fleet_neither_joins_nor_wipes_out_a_run_that_another_one_has(
    redis: Any, url: str, tmp_path: Path
) -> None:
    """Started elsewhere under the same name, it replaced the first one's workers, each in turn."""
    (tmp_path / "summary.json").write_text("{}")
    config = config_of(run={"name": "r"}, redis={"url": url})
    async with leading(redis, "a"):
        with pytest.raises(BadInput, match=r"led by a at a:1 .* another run\.name"):
            await asyncio.to_thread(check_no_leader, config)
        with pytest.raises(BadInput, match="another fleet runs it"):
            await asyncio.to_thread(clear, config, tmp_path)
        assert await redis.exists(KEYS.leader)
        assert (tmp_path / "summary.json").exists()
    await asyncio.to_thread(clear, config, tmp_path)
    assert not await redis.exists(KEYS.term)


async def test_a_lease_is_renewed_and_taken_while_redis_is_full(redis: Any, url: str) -> None:
    a = candidate(redis, "a")
    term = await granted(a)
    await redis.config_set("maxmemory", 24 << 20)
    try:
        with connect_sync(url) as client, full_redis(client):
            with pytest.raises(OutOfMemoryError):
                await redis.set("any", "x")
            assert await a.renew(term)
            await redis.delete(KEYS.leader)
            assert await a.renew(term), "its lease had run out"
            assert (await a.holder())[0] is not None
            await a.release()
            second = await granted(candidate(redis, "b"), term)
            assert second > term
    finally:
        await redis.config_set("maxmemory", 0)


async def test_a_lease_that_was_released_is_never_renewed(redis: Any) -> None:
    """Housekeeping asks for it at the end of a run: nobody would lead until the lease runs out."""
    a = candidate(redis, "a")
    term = await granted(a)
    # The renewal is on its way as the lease is released.
    await asyncio.gather(a.renew(term), a.release())
    assert not await a.renew(term)
    assert await redis.get(KEYS.leader) is None
    assert not a.holds_lease
    assert await a.acquire(term) is not None and await redis.get(KEYS.leader), "a new term"


async def test_a_full_disk_under_redis_is_named(redis: Any) -> None:
    with pytest.raises(RedisError) as refused:
        # As the server says it within a script.
        await redis.eval(
            "return redis.error_reply('MISCONF Errors writing to the AOF file: No space left on "
            "device')",
            0,
        )
    assert trouble_of(refused.value) == UNWRITABLE and "RUN_DIR/redis" in remedy_of(UNWRITABLE)
