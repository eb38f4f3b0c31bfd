"""Where members meet, and how they give up: one process, real Redis."""

from __future__ import annotations

import threading
import time

import psutil
import pytest
import redis

from paceline.config.services import RedisConfig
from paceline.mesh.rendezvous import (
    EpochCancelled,
    MeshError,
    RedisStore,
    Rendezvous,
    local_address,
)
from paceline.redis.server import ensure_redis, stop_redis


def meet(url: str, key: str, timeout_s: float = 60.0) -> Rendezvous:
    return Rendezvous(url, key, cancelled=lambda: False, timeout_s=timeout_s)


def test_a_value_is_waited_for(url: str) -> None:
    reader, writer = meet(url, "wait"), meet(url, "wait")
    threading.Timer(0.05, writer.put, ("name", b"value")).start()
    assert reader.get(["name"]) == [b"value"]


def test_a_superseded_meeting_gives_up_at_once(url: str) -> None:
    """Long before its own time limit, even on a busy machine."""
    over = threading.Event()
    meeting = Rendezvous(url, "superseded", cancelled=over.is_set, timeout_s=600)
    threading.Timer(0.05, over.set).start()
    started = time.monotonic()
    with pytest.raises(EpochCancelled):
        meeting.get(["never"])
    assert time.monotonic() - started < 60


def test_a_rank_is_claimed_once(url: str) -> None:
    meet(url, "claims").claim(0)
    with pytest.raises(MeshError, match=r"rank 0 .* is taken"):
        meet(url, "claims").claim(0)
    meet(url, "claims").claim(1)


def test_a_meeting_expires_by_itself(url: str) -> None:
    meeting = meet(url, "expiry", timeout_s=5)
    meeting.claim(0)
    meeting.put("name", b"value")
    left_s = redis.Redis.from_url(url).ttl("expiry")
    assert 0 < left_s <= 65


def test_redis_away_is_waited_out(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("away")
    # A worker may use keys of meetings only.
    key = "paceline:away:rdv:mesh:1:0"
    endpoint = ensure_redis(directory, RedisConfig())
    meeting = meet(endpoint.worker_url, key, timeout_s=30)
    meeting.put("before", b"1")
    server = psutil.Process(endpoint.pid)
    server.kill()
    server.wait()
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.extend(meeting.get(["before", "after"])))
    reader.start()
    try:
        endpoint = ensure_redis(directory, RedisConfig())
        meet(endpoint.worker_url, key).put("after", b"2")
        reader.join(timeout=60)
        assert found == [b"1", b"2"]
    finally:
        stop_redis(directory)


def test_no_redis_is_an_error_after_the_timeout() -> None:
    meeting = meet("redis://127.0.0.1:1/0", "nowhere", timeout_s=0.2)
    with pytest.raises(MeshError, match="Redis"):
        meeting.put("name", b"value")


def test_the_store_does_what_torch_asks_of_it(url: str) -> None:
    store, other = RedisStore(meet(url, "store")), RedisStore(meet(url, "store"))
    store.set("bytes", b"\x00\xff")
    store.set("text", "abc")
    assert other.get("bytes") == b"\x00\xff"
    store.wait(["bytes", "text"])
    assert other.get("text") == b"abc"


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
