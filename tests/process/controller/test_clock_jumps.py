"""Wall clocks that jump by an hour, forward and backward: a run keeps its processes and goes on."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from paceline.config.schema import RedisConfig
from paceline.observe.fleet_file import ProcessId
from paceline.redis.server import embedded_pid, ensure_redis, stop_redis

HOUR = 3600.0


@pytest.fixture
def child() -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process.pid
    process.kill()
    process.wait()


def jump(monkeypatch: pytest.MonkeyPatch, by_s: float) -> None:
    """As after ``date -s``: the kernel derives the boot time, and with it each process's start in
    Unix time, from the new wall clock."""
    before = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: before(self) + by_s)


@pytest.mark.parametrize("by_s", [HOUR, -HOUR])
def test_a_process_is_still_known_after_the_clock_was_set(
    child: int, by_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise ``paceline up`` would neither stop its fleet nor take it over."""
    known = ProcessId.of(child)
    jump(monkeypatch, by_s)
    assert known.alive()


@pytest.mark.parametrize("by_s", [HOUR, -HOUR])
def test_redis_is_not_started_twice_after_the_clock_was_set(
    tmp_path: Path, by_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers would write one append-only file; the first would outlive the run."""
    first = ensure_redis(tmp_path, RedisConfig())
    assert first.pid is not None
    try:
        jump(monkeypatch, by_s)
        assert embedded_pid(tmp_path) == first.pid
        assert not ensure_redis(tmp_path, RedisConfig()).started
        assert stop_redis(tmp_path)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(first.pid, signal.SIGKILL)
        stop_redis(tmp_path)
