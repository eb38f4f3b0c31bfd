"""Servers of the user's own that nobody maintains any more."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from paceline.config.sections.services import RedisConfig
from paceline.redis import server
from paceline.redis.server import NoRedis, ensure_redis, find_server


class Existing:
    def __init__(self, info: dict[str, str]) -> None:
        self._info = info

    def __enter__(self) -> Existing:
        return self

    def __exit__(self, *_: object) -> None: ...

    def ping(self) -> None: ...

    def info(self, section: str) -> dict[str, str]:
        return self._info


# Valkey says 7.2.4 to clients that ask for a Redis.
@pytest.mark.parametrize(
    ("info", "accepted"),
    [
        ({"redis_version": "6.2.14"}, False),
        ({"redis_version": "7.2.16"}, True),
        ({"redis_version": "10.0.1"}, True),
        ({}, True),
        ({"redis_version": "unstable"}, True),
        ({"redis_version": "7.2.4", "valkey_version": "9.1.2"}, True),
    ],
)
def test_servers_without_security_releases_are_refused(
    monkeypatch: pytest.MonkeyPatch, info: dict[str, Any], accepted: bool
) -> None:
    monkeypatch.setattr(server, "connect_sync", lambda url, timeout_s: Existing(info))
    settings = RedisConfig(url="redis://u:secret@h:1/0")
    if accepted:
        assert ensure_redis(Path(), settings).url == settings.url
        return
    said = r"redis\.url redis://u:\*\*\*@h:1/0: version 6\.2\.14 is no longer maintained"
    with pytest.raises(NoRedis, match=said):
        ensure_redis(Path(), settings)


def test_a_server_on_the_path_that_is_too_old_or_does_not_answer_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def install(name: str, command: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{command}\n")
        (tmp_path / name).chmod(0o755)

    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    for limit_s, command in ((0.2, "exec /bin/sleep 60"), (60.0, "echo 'Valkey server v=6.9.1'")):
        monkeypatch.setattr(server, "VERSION_S", limit_s)
        install("valkey-server", command)
        with pytest.raises(NoRedis, match="no Redis server of version 7"):
            find_server()
    install("redis-server", "echo 'Redis server v=7.2.4'")
    assert find_server() == tmp_path / "redis-server"
