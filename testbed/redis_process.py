"""A throwaway Redis server in a directory of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.config.schema import RedisConfig
from paceline.redis.server import ensure_redis, stop_redis


@contextmanager
def throwaway_redis(directory: Path) -> Iterator[str]:
    """URL of a running server; it is stopped at the end."""
    endpoint = ensure_redis(directory, RedisConfig())
    try:
        yield endpoint.url
    finally:
        stop_redis(directory)
