"""A throwaway Redis server in a directory of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.rpc.addresses import free_ports
from testbed.redis.external_redis import Server


@contextmanager
def throwaway_redis(directory: Path) -> Iterator[str]:
    """URL of a running server without passwords, on which every command is allowed."""
    directory.mkdir(parents=True, exist_ok=True)
    (port,) = free_ports("127.0.0.1", 1)
    server = Server(directory, "throwaway", port, "appendonly yes", 'save ""')
    try:
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.kill()
