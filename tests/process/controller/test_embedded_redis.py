"""The embedded Redis is found, never doubled, and replaced when it dies."""

import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from controller.store.journal import Journal, Position
from controller.store.redis_keys import Keys
from paceline.config.sections.services import RedisConfig
from paceline.redis.client import connect, connect_sync
from paceline.redis.server import RedisEndpoint, ensure_redis, stop_redis


def test_a_server_that_dies_while_it_is_waited_for_is_replaced(tmp_path: Path) -> None:
    """A process that was just killed still counts as running for an instant."""
    first = ensure_redis(tmp_path, RedisConfig())
    assert first.pid is not None
    second: list[RedisEndpoint] = []
    try:
        os.kill(first.pid, signal.SIGSTOP)  # it lives, and answers nobody
        waiter = threading.Thread(
            target=lambda: second.append(ensure_redis(tmp_path, RedisConfig()))
        )
        waiter.start()
        waiter.join(0.5)
        assert waiter.is_alive(), "a server that does not answer must be waited for, not doubled"
        os.kill(first.pid, signal.SIGKILL)
        waiter.join(60)
    finally:
        stop_redis(tmp_path)
    (found,) = second
    assert found.started and found.pid != first.pid
    assert found.url == first.url, "clients that only reconnect must find it"


def test_a_run_directory_may_have_any_name_and_be_named_relative_to_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = """with "quotes", \\ and \\n, and a space's ' end"""
    monkeypatch.chdir(tmp_path)
    try:
        endpoint = ensure_redis(Path(name), RedisConfig())
        assert endpoint.started
        assert not ensure_redis(tmp_path / name, RedisConfig()).started
        with connect_sync(endpoint.url) as client:
            assert client.ping()
        assert list((tmp_path / name / "redis" / "appendonlydir").iterdir())
    finally:
        stop_redis(tmp_path / name)


def slow_disk(directory: Path) -> Path:
    """A library that makes a process preloaded with it take long to sync a file."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to slow the disk down with")
    source = Path(__file__).parents[2] / "fakes" / "slow_sync.c"
    library = directory / "slow_sync.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return library


async def test_what_was_appended_survives_a_kill_in_the_middle_of_a_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis puts writes off while it syncs its file, and answers them all the same."""
    monkeypatch.setenv("LD_PRELOAD", str(slow_disk(tmp_path)))
    first = ensure_redis(tmp_path, RedisConfig())
    monkeypatch.delenv("LD_PRELOAD")
    assert first.pid is not None
    keys = Keys("r")
    client = connect(first.url)
    try:
        await client.set(keys.term, "1")
        journal = Journal(client, keys)
        at = Position()

        async def append() -> Position:
            event = {"type": "x"}
            return await journal.append(at, term=1, batch=f"b{at.number}", t=1.0, events=[event])

        # A sync begins with one of the first writes, and what comes after is put off.
        while not (await client.info("persistence"))["aof_pending_bio_fsync"]:
            at = await append()
        at = await append()
        os.kill(first.pid, signal.SIGKILL)
        await client.aclose()
        again = ensure_redis(tmp_path, RedisConfig())
        client = connect(again.url)
        assert await Journal(client, keys).head() == at
    finally:
        await client.aclose()
        stop_redis(tmp_path)
