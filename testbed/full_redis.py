"""Filling of a Redis server to its memory limit, with the rights of a controller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis.exceptions import OutOfMemoryError

PREFIX = "paceline:filling"
PIECE = 1 << 20
LAST = 16 << 20
"""A write is refused only once the limit is exceeded: the last one exceeds it by far."""


@contextmanager
def full_redis(client: Any) -> Iterator[None]:
    """``client`` is blocking; its server has a limit (redis.maxmemory_mb). Empties it at the end."""
    written = 0
    try:
        while _put(client, written, PIECE):
            written += 1
        room = written
        while not _put(client, written, LAST):
            room -= 1
            client.delete(f"{PREFIX}:{room}")
        yield
    finally:
        for number in range(written + 1):
            client.delete(f"{PREFIX}:{number}")


def _put(client: Any, number: int, size: int) -> bool:
    """False if there is no room."""
    try:
        return bool(client.set(f"{PREFIX}:{number}", bytes(size)))
    except OutOfMemoryError:
        return False
