"""Rendezvous of the members of one epoch: hashes in Redis, and a torch store on top of one of them.

What every member says to all others is a *round*, a hash of its own. The last member to speak puts
one token for each of them on a list, where they wait: Redis wakes each once, and nobody asks again
and again. So a meeting takes each member some twenty commands, however many members there are and
however late the last one comes (two more commands for each second of waiting).

Invariants:

- A meeting is used once. Each rank is claimed by one process; a second claim is refused, so that
  addresses of an earlier try never mix with those of a later one.
- Every wait ends soon after ``cancelled()`` turns true: a superseded epoch gives up by itself.
- A token that is lost, with its reply or because the last member died before it put the tokens
  there, costs time alone: who waits looks at the hash itself now and then.
- Nothing is left behind: hashes and lists expire by themselves.
"""

import secrets
import socket
import time
from collections.abc import Callable
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

_RETRY_S = 0.02
BLOCK_S = 0.5
"""Longest time that a member waits for its token before it looks whether it was cancelled."""
LOOK_EVERY = 4
"""Waits in vain after which it looks at the hash itself."""


class MeshError(RuntimeError):
    """A rendezvous or a collective failed. The mesh is of no further use; form the next epoch."""


class EpochCancelled(Exception):
    """The epoch was over before this operation ended. No member is at fault."""


@dataclass(frozen=True, slots=True)
class MeshMember:
    """A member of an epoch."""

    rank: int
    size: int
    device: torch.device
    host: str
    timeout_s: float


class Rendezvous:
    """One meeting of the members of an epoch, under the Redis hash ``key``. ``url``: Redis URL.
    ``cancelled``: polled while waiting; true makes every wait raise EpochCancelled. ``timeout_s``:
    from now; after it every wait raises MeshError. An outage of Redis is waited out until the
    timeout. Safe to use from one thread at a time."""

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
        field, token = f"claim:{rank}", secrets.token_bytes(8)

        def write() -> bytes:
            pipe = self._redis.pipeline(transaction=False)
            pipe.hsetnx(self._key, field, token)
            pipe.expire(self._key, self._ttl_s)
            pipe.hget(self._key, field)
            return bytes(pipe.execute()[2])

        # What is there then tells a retry of our own lost reply from a second member.
        if self._patiently(write) != token:
            raise MeshError(f"rank {rank} of {self._key} is taken: an epoch is formed only once")

    def speak(self, topic: str, name: str, value: bytes, size: int) -> None:
        """Says ``value`` as ``name`` in the round ``topic``, in which each member speaks once."""
        said = f"{self._key}:{topic}"

        def write() -> int:
            pipe = self._redis.pipeline(transaction=False)
            pipe.hset(said, name, value)
            pipe.expire(said, self._ttl_s)
            pipe.hlen(said)
            return int(pipe.execute()[2])

        if self._patiently(write) == size:

            def wake() -> None:
                pipe = self._redis.pipeline(transaction=False)
                pipe.rpush(f"{said}:tokens", *[b"1"] * size)
                pipe.expire(f"{said}:tokens", self._ttl_s)
                pipe.execute()

            self._patiently(wake)  # a repeat leaves tokens over, which expire

    def hear(self, topic: str, size: int) -> dict[str, bytes]:
        """Waits for the values of all ``size`` members in the round; returns them by member."""
        said, waits = f"{self._key}:{topic}", 0

        def wait() -> bool:
            return self._redis.blpop([f"{said}:tokens"], timeout=BLOCK_S) is not None

        def count() -> int:
            return int(self._redis.hlen(said))

        while not self._patiently(wait):
            waits += 1
            if waits % LOOK_EVERY == 0 and self._patiently(count) >= size:
                break
            if time.monotonic() >= self._deadline:
                self._check(f"{self._absent(topic, size)} missing")
        return self._said(topic)

    def _said(self, topic: str) -> dict[str, bytes]:
        found = self._patiently(lambda: self._redis.hgetall(f"{self._key}:{topic}"))
        return {name.decode(): bytes(value) for name, value in found.items()}

    def _absent(self, topic: str, size: int) -> str:
        """Ranks that have not spoken in the round: they end the names under which members speak."""
        there = {name.rpartition("/")[2] for name in self._said(topic)}
        return ", ".join(f"{topic}:{rank}" for rank in range(size) if str(rank) not in there)

    def exchange(self, topic: str, rank: int, value: bytes, size: int) -> list[bytes]:
        """Says ``value`` to all members; returns what each said, by rank."""
        self.speak(topic, str(rank), value, size)
        heard = self.hear(topic, size)
        return [heard[str(peer)] for peer in range(size)]

    def close(self) -> None:
        self._redis.close()

    def _patiently(self, call: Callable[[], T]) -> T:
        """Runs ``call``, which may be repeated, until Redis answers."""
        while True:
            if self._cancelled():
                raise EpochCancelled(self._key)
            try:
                return call()
            except redis.RedisError as error:
                self._check(f"Redis: {error}")
                time.sleep(_RETRY_S)

    def _check(self, why: str) -> None:
        if self._cancelled():
            raise EpochCancelled(self._key)
        if time.monotonic() >= self._deadline:
            raise MeshError(f"rendezvous {self._key} timed out: {why}")


class RedisStore(dist.Store):  # type: ignore[misc]
    """Store over a Rendezvous, with what a gloo group asks of a torch store while it forms.

    Each of ``size`` members sets one key, its addresses, and then asks for those of all members,
    one after the other: they are fetched at once. A key that no such round holds is an error.

    torch keeps only a C++ reference to it: the group's owner must keep the Python object alive for
    as long as the group.
    """

    def __init__(self, meeting: Rendezvous, size: int) -> None:
        super().__init__()
        self._meeting = meeting
        self._size = size
        self._heard: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        said = value.encode() if isinstance(value, str) else bytes(value)
        self._meeting.speak("store", key, said, self._size)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._heard[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        # The meeting's own deadline holds: torch's per-call timeout is the same or longer.
        if not self._heard:
            self._heard = self._meeting.hear("store", self._size)
        missing = [key for key in keys if key not in self._heard]
        if missing:
            raise MeshError(
                f"no member has set {missing[0]!r}: this release of torch forms gloo groups in "
                "another way; use the one in constraints.txt"
            )


def local_address(url: str) -> str:
    """IP address of this machine on the way to the Redis server of ``url``. The members of a mesh
    all know that server, so they can reach each other at this address: loopback if Redis is on
    loopback."""
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


def host_store(
    host: str, timeout: timedelta, size: int | None = None, *, port: int = 0
) -> dist.TCPStore:
    """A store whose server listens on ``port`` (0: a free one) of ``host`` and of no other address.
    ``size``: number of the processes that will use it, if known. Raises OSError if the port is
    taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=128)
    port = listener.getsockname()[1]
    # The store owns the socket from here on, and closes it.
    return dist.TCPStore(
        host,
        port,
        size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
