"""Where members meet, and how they give up: one process, real Redis, real stores of torch."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta

import psutil
import pytest
import redis
import torch.distributed as dist

from paceline.config.sections.services import RedisConfig
from paceline.mesh import rendezvous
from paceline.mesh.rendezvous import (
    EpochCancelled,
    MeshError,
    RedisStore,
    Rendezvous,
    host_store,
    local_address,
)
from paceline.redis.server import ensure_redis, stop_redis


def meet(url: str, key: str, timeout_s: float = 60.0) -> Rendezvous:
    return Rendezvous(url, key, cancelled=lambda: False, timeout_s=timeout_s)


def test_a_superseded_meeting_gives_up_at_once(url: str) -> None:
    """Long before its own time limit, even on a busy machine."""
    over = threading.Event()
    meeting = Rendezvous(url, "superseded", cancelled=over.is_set, timeout_s=600)
    threading.Timer(0.05, over.set).start()
    started = time.monotonic()
    with pytest.raises(EpochCancelled):
        meeting.hear("round", 1)
    assert time.monotonic() - started < 60


def test_a_rank_is_claimed_once(url: str) -> None:
    meet(url, "claims").claim(0)
    with pytest.raises(MeshError, match=r"rank 0 .* is taken"):
        meet(url, "claims").claim(0)
    meet(url, "claims").claim(1)


def test_a_meeting_expires_by_itself(url: str) -> None:
    meeting = meet(url, "expiry", timeout_s=5)
    meeting.claim(0)
    meeting.speak("round", "0", b"value", 2)
    client = redis.Redis.from_url(url)
    assert all(0 < client.ttl(key) <= 65 for key in ("expiry", "expiry:round"))


def test_redis_away_is_waited_out(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("away")
    # A worker may use keys of meetings only.
    key = "paceline:away:rdv:mesh:1:0"
    endpoint = ensure_redis(directory, RedisConfig())
    meeting = meet(endpoint.worker_url, key, timeout_s=30)
    meeting.speak("round", "0", b"1", 2)
    server = psutil.Process(endpoint.pid)
    server.kill()
    server.wait()
    found: dict[str, bytes] = {}
    reader = threading.Thread(target=lambda: found.update(meeting.hear("round", 2)))
    reader.start()
    try:
        endpoint = ensure_redis(directory, RedisConfig())
        meet(endpoint.worker_url, key).speak("round", "1", b"2", 2)
        reader.join(timeout=60)
        assert found == {"0": b"1", "1": b"2"}
    finally:
        stop_redis(directory)


def test_no_redis_is_an_error_after_the_timeout() -> None:
    meeting = meet("redis://127.0.0.1:1/0", "nowhere", timeout_s=0.2)
    with pytest.raises(MeshError, match="Redis"):
        meeting.claim(0)


def test_a_torch_that_asks_the_store_for_more_gets_an_error_with_a_remedy(url: str) -> None:
    store = RedisStore(meet(url, "other-torch"), 1)
    store.set("0/0", b"x")
    with pytest.raises(MeshError, match=r"'1/0'.* constraints\.txt"):
        store.get("1/0")


def exchange_all(url: str, key: str, size: int, before_last: Callable[[], None]) -> None:
    """Every member hears every member; the last one comes after ``before_last``."""
    heard: list[list[bytes]] = []

    def join(rank: int) -> None:
        heard.append(meet(url, key).exchange("round", rank, b"%d" % rank, size))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
    for thread in threads[:-1]:
        thread.start()
    before_last()
    threads[-1].start()
    for thread in threads:
        thread.join()
    assert heard == [[b"%d" % rank for rank in range(size)]] * size


def commands_of(client: redis.Redis) -> Counter[str]:
    """Calls of each command that a round is made of."""
    stats = client.info("commandstats")
    names = ["hset", "expire", "hlen", "rpush", "blpop", "hgetall", "hget"]
    return Counter({name: stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in names})


def waiting_members(client: redis.Redis) -> int:
    return int(client.info("clients")["blocked_clients"])


@pytest.mark.parametrize("size", [4, 16])
def test_a_round_costs_each_member_the_same_few_commands(url: str, size: int) -> None:
    """However many members there are. Who waits for a late one does not ask again and again."""
    client = redis.Redis.from_url(url)

    def until_all_wait() -> None:
        while waiting_members(client) < size - 1:
            threading.Event().wait(0.01)

    before = commands_of(client)
    exchange_all(url, f"round-of-{size}", size, until_all_wait)
    made = commands_of(client) - before
    # On a machine that is slow just now, a wait may have been repeated.
    assert made.pop("blpop") >= size
    assert made == Counter(hset=size, expire=size + 1, hlen=size, rpush=1, hgetall=size)


def test_tokens_that_are_lost_cost_time_alone(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last member dies after it spoke and before it woke the others, or Redis loses the
    list."""
    monkeypatch.setattr(rendezvous, "BLOCK_S", 0.02)
    client = redis.Redis.from_url(url)
    first, last = meet(url, "lost"), meet(url, "lost")
    client.hset("lost:round", "1", b"b")
    client.set("lost:round:tokens", "no list")  # what wakes the others fails
    with pytest.raises(MeshError, match="WRONGTYPE"):
        last_words = Rendezvous(url, "lost", cancelled=lambda: False, timeout_s=0.05)
        last_words.speak("round", "0", b"a", 2)
    client.delete("lost:round:tokens")
    assert first.hear("round", 2) == last.hear("round", 2) == {"0": b"a", "1": b"b"}


def test_who_speaks_twice_is_one_member(url: str) -> None:
    """As after an answer of Redis that was lost."""
    first, second = meet(url, "twice"), meet(url, "twice")
    first.speak("round", "0", b"a", 2)
    first.speak("round", "0", b"a", 2)
    threading.Timer(0.05, second.speak, ("round", "1", b"b", 2)).start()
    assert first.hear("round", 2) == {"0": b"a", "1": b"b"}


def test_a_member_that_never_comes_ends_the_round_at_the_time_limit(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "BLOCK_S", 0.02)
    meeting = meet(url, "absent", timeout_s=0.1)
    with pytest.raises(MeshError, match="round:1 missing"):
        meeting.exchange("round", 0, b"a", 2)


@pytest.mark.parametrize(
    "address",
    [
        "redis://:secret@127.0.0.1:6379/0",
        "unix:///run/redis.sock",
        "redis+sentinel://127.0.0.1:26379/main",
    ],
)
def test_members_of_a_loopback_redis_meet_on_loopback(address: str) -> None:
    assert local_address(address) == "127.0.0.1"


WAIT = timedelta(seconds=60)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_a_store_listens_on_its_address_alone(host: str) -> None:
    store = host_store(host, WAIT)
    listening = {
        c.laddr.ip
        for c in psutil.Process().net_connections("tcp")
        if c.status == psutil.CONN_LISTEN and c.laddr.port == store.port
    }
    assert listening == {host}
    store.set("config", "mine")
    other = dist.TCPStore(host, store.port, None, False, WAIT)
    assert other.get("config") == b"mine"


def test_a_store_that_has_gone_leaves_no_socket() -> None:
    before = psutil.Process().num_fds()
    store = host_store("127.0.0.1", WAIT)
    del store
    assert psutil.Process().num_fds() <= before
