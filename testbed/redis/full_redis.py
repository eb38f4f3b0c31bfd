"""Filling of a Redis server to its memory limit, with the rights of a controller."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis.exceptions import OutOfMemoryError

PREFIX = "paceline:filling"
PIECE = 1 << 20
LAST = 4 << 20
OVERFILL = "return redis.call('SET', KEYS[1], string.rep('x', tonumber(ARGV[1])))"
"""A script may write if there is room at its start; the argument of a command needs room itself."""


@contextmanager
def full_redis(client: Any) -> Iterator[None]:
    """``client`` is blocking; its server has a limit (redis.maxmemory_mb). Empties it at the
    end."""
    written = 0
    try:
        while _put(client, written):
            written += 1
        client.delete(f"{PREFIX}:{written - 1}")
        client.eval(OVERFILL, 1, f"{PREFIX}:{written}", LAST)
        yield
    finally:
        for number in range(written + 1):
            client.delete(f"{PREFIX}:{number}")


def _put(client: Any, number: int) -> bool:
    """False if there is no room."""
    try:
        return bool(client.set(f"{PREFIX}:{number}", bytes(PIECE)))
    except OutOfMemoryError:
        return False
