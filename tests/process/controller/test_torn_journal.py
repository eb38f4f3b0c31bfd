"""The append-only file of a run's own Redis after a power cut."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.config.sections.services import RedisConfig
from paceline.redis.append_only_file import whole_commands
from paceline.redis.client import connect_sync
from paceline.redis.server import NoRedis, ensure_redis, stop_redis

KEYS = 200


@pytest.fixture
def newest(tmp_path: Path) -> Path:
    """The newest file of a server that has ended, with ``KEYS`` keys in it."""
    endpoint = ensure_redis(tmp_path, RedisConfig())
    with connect_sync(endpoint.url) as client:
        for number in range(KEYS):
            client.set(f"paceline:run:{number}", f"value {number}".encode() * 20)
    stop_redis(tmp_path)
    (file,) = (tmp_path / "redis" / "appendonlydir").glob("*.incr.aof")
    return file


def keys_left(run_dir: Path) -> tuple[int, str]:
    try:
        endpoint = ensure_redis(run_dir, RedisConfig())
        with connect_sync(endpoint.url) as client:
            return sum(1 for _ in client.scan_iter(match="paceline:run:*")), endpoint.healed
    finally:
        stop_redis(run_dir)


def zeroed(whole: bytes) -> bytes:
    return whole[:-3039] + bytes(3039)


def zeroes_behind(whole: bytes) -> bytes:
    return whole + bytes(4096)


def noise(whole: bytes) -> bytes:
    return whole[:-3039] + os.urandom(3039)


@pytest.mark.parametrize("torn", [zeroed, zeroes_behind, noise])
def test_a_torn_tail_is_cut_at_the_last_whole_command_and_kept(
    newest: Path, tmp_path: Path, torn: Callable[[bytes], bytes]
) -> None:
    whole = newest.read_bytes()
    damaged = torn(whole)
    newest.write_bytes(damaged)
    left, healed = keys_left(tmp_path)
    lost = 1 if torn in (zeroed, noise) else 0
    assert KEYS - 20 < left <= KEYS - lost
    (copy,) = newest.parent.glob("*.cut-at-*")
    at = int(re.search(r"(\d+)$", copy.name)[1])  # type: ignore[index]
    assert copy.read_bytes() == damaged[at:] and whole.startswith(damaged[:at])
    assert str(copy) in healed and "power cut" in healed
    again, healed = keys_left(tmp_path)
    assert again == left and not healed


def test_a_tail_that_is_only_short_needs_no_mending(newest: Path, tmp_path: Path) -> None:
    os.truncate(newest, newest.stat().st_size - 7)
    assert keys_left(tmp_path) == (KEYS - 1, "")


def test_damage_in_the_middle_is_refused_with_what_can_be_done(
    newest: Path, tmp_path: Path
) -> None:
    whole = bytearray(newest.read_bytes())
    middle = len(whole) // 2
    whole[middle : middle + 600] = bytes(600)
    newest.write_bytes(whole)
    with pytest.raises(NoRedis) as refused:
        keys_left(tmp_path)
    for words in (str(newest), "Nothing was changed", "--from", "truncate"):
        assert words in str(refused.value)
    assert newest.read_bytes() == whole
    assert not list(newest.parent.glob("*.cut-at-*"))


def test_a_transaction_without_its_end_is_no_whole_command() -> None:
    def command(*words: str) -> bytes:
        return b"*%d\r\n" % len(words) + b"".join(
            b"$%d\r\n%s\r\n" % (len(word), word.encode()) for word in words
        )

    first = command("SET", "a", "b")
    begun = command("MULTI") + command("SET", "c", "d")
    assert whole_commands(first + begun) == len(first)
    assert whole_commands(first + begun + command("EXEC")) == len(first + begun + command("EXEC"))
    assert whole_commands(b"#TS:1795712013\r\n" + first + b"*1\r\n$4\r\nPI") == 16 + len(first)
