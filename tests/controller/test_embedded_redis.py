"""The embedded Redis is found, never doubled, and replaced when it dies."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from paceline.config.schema import RedisConfig
from paceline.redis_server import RedisEndpoint, ensure_redis, stop_redis


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
        waiter.join(20.0)
    finally:
        stop_redis(tmp_path)
    (found,) = second
    assert found.started and found.pid != first.pid
    assert found.url == first.url, "clients that only reconnect must find it"


def test_a_run_directory_may_be_named_relative_to_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        assert ensure_redis(Path("run"), RedisConfig()).started
        assert not ensure_redis(tmp_path / "run", RedisConfig()).started
    finally:
        stop_redis(Path("run"))
