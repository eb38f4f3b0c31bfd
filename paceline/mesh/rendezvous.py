"""Rendezvous of the members of one epoch: a hash in Redis, and a torch store on top of it.

Invariants:

- A meeting is used once. Each rank is claimed by one process; a second claim is refused, so that
  addresses of an earlier try never mix with those of a later one.
- Every wait ends soon after ``cancelled()`` turns true: a superseded epoch gives up by itself.
- Nothing is left behind: the hash expires by itself.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

import redis
import torch
import torch.distributed as dist

from paceline.redis.client import connect_sync, parse_sentinel
from paceline.rpc.addresses import address_towards

T = TypeVar("T")

# Redis answers a poll in well under a millisecond; members usually arrive within a few of these.
_FIRST_POLL_S = 0.001
_LONGEST_POLL_S = 0.02


class MeshError(RuntimeError):
    """A rendezvous or a collective failed. The mesh is of no further use; form the next epoch."""


class EpochCancelled(Exception):
    """The epoch was over before this operation ended. No member is at fault."""


@dataclass(frozen=True, slots=True)
class MeshMember:
    """A member of an epoch."""

    rank: int
    size: int
    """Of the whole mesh."""
    device: torch.device
    """Where this member computes."""
    host: str
    """Address at which the others reach it."""
    timeout_s: float
    """For connecting."""


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

    def claim(self, rank: int) -> None:
        """Takes ``rank`` for this process. Raises MeshError if it is taken already."""
        token = secrets.token_bytes(8)
        # What is there then tells a retry of our own lost reply from a second member.
        if self._write("hsetnx", f"claim:{rank}", token) != token:
            raise MeshError(f"rank {rank} of {self._key} is taken: an epoch is formed only once")

    def put(self, field: str, value: bytes) -> None:
        """Publishes ``value`` to all members."""
        self._write("hset", field, value)

    def get(self, fields: Iterable[str]) -> list[bytes]:
        """Values of ``fields``, in order; waits until all are there."""
        names = list(fields)

        def read() -> list[bytes | None]:
            return list(self._redis.hmget(self._key, names))

        pause_s = _FIRST_POLL_S
        while True:
            values = self._patiently(read)
            if all(value is not None for value in values):
                return [bytes(value) for value in values if value is not None]
            missing = [n for n, value in zip(names, values, strict=True) if value is None]
            self._rest(pause_s, f"{', '.join(missing)} missing")
            pause_s = min(pause_s * 1.5, _LONGEST_POLL_S)

    def close(self) -> None:
        self._redis.close()

    def _write(self, command: str, field: str, value: bytes) -> bytes:
        """Runs HSET or HSETNX; returns what the field holds after it."""

        def write() -> bytes:
            pipe = self._redis.pipeline(transaction=True)
            getattr(pipe, command)(self._key, field, value)
            pipe.expire(self._key, self._ttl_s)
            pipe.hget(self._key, field)
            return bytes(pipe.execute()[2])

        return self._patiently(write)

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
        time.sleep(seconds)


class RedisStore(dist.Store):  # type: ignore[misc]
    """What a gloo group asks of a torch store while it forms, over a Rendezvous.

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

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        # The meeting's own deadline holds: torch's per-call timeout is the same or longer.
        self._meeting.get(f"s:{key}" for key in keys)


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
        return address_towards(server, port)
    except OSError as error:
        raise MeshError(f"no route to the rendezvous at {server}: {error}") from error
