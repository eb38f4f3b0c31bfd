"""Rendezvous of the members of one epoch: a hash in Redis, and a torch store on top of it.

Invariants:

- A meeting is used once. Each rank is claimed by one process; a second claim is refused, so that
  addresses of an earlier try never mix with those of a later one.
- Every wait ends soon after ``cancelled()`` turns true: a superseded epoch gives up by itself.
- Nothing is left behind: the hash expires by itself.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

import redis
import torch.distributed as dist

from paceline.redis.client import connect_sync, parse_sentinel

T = TypeVar("T")

# Redis answers a poll in well under a millisecond; members usually arrive within a few of these.
_FIRST_POLL_S = 0.001
_LONGEST_POLL_S = 0.02


class MeshError(RuntimeError):
    """A rendezvous or a collective failed. The mesh is of no further use; form the next epoch."""


class EpochCancelled(Exception):
    """The epoch was over before this operation ended. No member is at fault."""


class Rendezvous:
    """One meeting of the members of an epoch, under the Redis hash ``key``.

    ``url``: Redis URL. ``cancelled``: polled while waiting; true makes every wait raise
    EpochCancelled. ``timeout_s``: from now; after it every wait raises MeshError.
    An outage of Redis is waited out until the timeout. Safe to use from one thread at a time.
    """

    def __init__(
        self, url: str, key: str, *, cancelled: Callable[[], bool], timeout_s: float
    ) -> None:
        self._redis: Any = connect_sync(url, timeout_s=2.0)
        self._key = key
        self._cancelled = cancelled
        self._deadline = time.monotonic() + timeout_s
        self._ttl_s = int(timeout_s) + 60
        self._pause = threading.Event()

    def claim(self, rank: int) -> None:
        """Takes ``rank`` for this process. Raises MeshError if it is taken already."""
        field, token = f"claim:{rank}", secrets.token_bytes(8)

        def take() -> bytes:
            # Reading the field back tells a retry of our own lost reply from a second member.
            pipe = self._redis.pipeline(transaction=True)
            pipe.hsetnx(self._key, field, token)
            pipe.expire(self._key, self._ttl_s)
            pipe.hget(self._key, field)
            return bytes(pipe.execute()[2])

        if self._patiently(take) != token:
            raise MeshError(f"rank {rank} of {self._key} is taken: an epoch is formed only once")

    def put(self, field: str, value: bytes) -> None:
        """Publishes ``value`` to all members."""

        def write() -> None:
            pipe = self._redis.pipeline(transaction=True)
            pipe.hset(self._key, field, value)
            pipe.expire(self._key, self._ttl_s)
            pipe.execute()

        self._patiently(write)

    def get(self, fields: Iterable[str]) -> list[bytes]:
        """Values of ``fields``, in order; waits until all are there."""
        names = list(fields)
        pause_s = _FIRST_POLL_S
        while True:
            values = self._read(names)
            if all(value is not None for value in values):
                return [bytes(value) for value in values if value is not None]
            missing = [n for n, value in zip(names, values, strict=True) if value is None]
            self._rest(pause_s, f"{', '.join(missing)} missing")
            pause_s = min(pause_s * 1.5, _LONGEST_POLL_S)

    def has(self, fields: Iterable[str]) -> bool:
        """Whether all ``fields`` are there now."""
        return all(value is not None for value in self._read(list(fields)))

    def add(self, field: str, amount: int) -> int:
        """Adds to a counter; returns its value after that. Not safe to repeat: Redis errors pass."""
        return int(self._redis.hincrby(self._key, field, amount))

    def delete(self, field: str) -> bool:
        return bool(self._patiently(lambda: self._redis.hdel(self._key, field)))

    def close(self) -> None:
        self._redis.close()

    def _read(self, names: list[str]) -> list[bytes | None]:
        return self._patiently(lambda: list(self._redis.hmget(self._key, names)))

    def _patiently(self, call: Callable[[], T]) -> T:
        """Runs ``call``, which may be repeated, until Redis answers."""
        while True:
            if self._cancelled():
                raise EpochCancelled(self._key)
            try:
                return call()
            except redis.RedisError as error:
                self._rest(_LONGEST_POLL_S, f"Redis: {error}")

    def _rest(self, seconds: float, why: str) -> None:
        if self._cancelled():
            raise EpochCancelled(self._key)
        if time.monotonic() >= self._deadline:
            raise MeshError(f"rendezvous {self._key} timed out: {why}")
        self._pause.wait(seconds)


class RedisStore(dist.Store):  # type: ignore[misc]
    """The torch store that a process group needs while it forms, over a Rendezvous.

    torch keeps only a C++ reference to it: the group's owner must keep the Python object alive for
    as long as the group.
    """

    def __init__(self, meeting: Rendezvous) -> None:
        super().__init__()
        self._meeting = meeting

    def set(self, key: str, value: bytes | str) -> None:
        self._meeting.put(f"s:{key}", value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._meeting.get([f"s:{key}"])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._meeting.get(f"s:{key}" for key in keys)

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return self._meeting.add(f"s:{key}", amount)

    def check(self, keys: list[str]) -> bool:
        return self._meeting.has(f"s:{key}" for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        # The meeting's own deadline holds: torch's per-call timeout is the same or longer.
        self._meeting.get(f"s:{key}" for key in keys)

    def delete_key(self, key: str) -> bool:
        return self._meeting.delete(f"s:{key}")


def local_address(url: str) -> str:
    """IP address of this machine on the way to the Redis server of ``url``.

    The members of a mesh all know that server, so they can reach each other at this
    address: loopback if Redis is on loopback.
    """
    sentinel = parse_sentinel(url)
    parts = urlsplit(url)
    if sentinel is not None:
        server, port = sentinel.sentinels[0]
    elif parts.scheme != "unix" and parts.hostname:
        server, port = parts.hostname, parts.port or 6379
    else:
        return "127.0.0.1"
    try:
        family, kind, proto, _, address = socket.getaddrinfo(server, port, type=socket.SOCK_DGRAM)[
            0
        ]
        # Connecting a datagram socket sends nothing; it only picks the route.
        with socket.socket(family, kind, proto) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise MeshError(f"no route to the rendezvous at {server}: {error}") from error
