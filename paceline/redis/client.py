"""Clients for a Redis URL: ``redis://``, ``rediss://``, ``unix://`` and Sentinel.

A Sentinel URL names the sentinels, the service and optionally a database number::

    redis+sentinel://:password@host1:26379,host2:26379/mymaster/0

The clients never retry: only the caller knows which commands may be sent twice. A full memory and a
full disk of the server have a name and a remedy; the words stand in the leader's log, in
``paceline status`` as the run's phase, and in ``paceline why``.
"""

import re
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from urllib.parse import unquote, urlsplit

SENTINEL_SCHEMES = ("redis+sentinel", "rediss+sentinel")
FULL = "paused: Redis full"
UNWRITABLE = "paused: Redis cannot write to its disk"

_REMEDIES = {
    FULL: (
        "Give it more memory (redis.maxmemory_mb, or maxmemory of your own server); payloads.url "
        "moves the payloads out of it"
    ),
    UNWRITABLE: (
        "Free space on the disk that holds the server's files (RUN_DIR/redis for a run's own "
        "server); the server's log names the error, and it accepts writes again by itself"
    ),
}


@dataclass(frozen=True, slots=True)
class SentinelUrl:
    sentinels: tuple[tuple[str, int], ...]
    service: str
    db: int
    username: str | None
    password: str | None
    tls: bool


def parse_sentinel(url: str) -> SentinelUrl | None:
    """Parts of a Sentinel URL; None for any other scheme. Raises ValueError if it is malformed."""
    parts = urlsplit(url)
    if parts.scheme not in SENTINEL_SCHEMES:
        return None
    credentials, _, hosts = parts.netloc.rpartition("@")
    username, _, password = credentials.partition(":")
    path = [piece for piece in parts.path.split("/") if piece]
    if not hosts or not path:
        raise ValueError(f"{parts.scheme}:// needs host:port[,host:port]/service[/db]")
    sentinels = []
    for host in hosts.split(","):
        name, _, port = host.rpartition(":")
        sentinels.append((name, int(port)) if name else (host, 26379))
    return SentinelUrl(
        sentinels=tuple(sentinels),
        service=path[0],
        db=int(path[1]) if len(path) > 1 else 0,
        username=unquote(username) or None,
        password=unquote(password) or None,
        tls=parts.scheme.startswith("rediss"),
    )


_PORT = re.compile(r"(?<=:)\d+(?=/0\?\S*ssl_ca_data=)")
"""Port in the URL of the listener in front of a run's own Redis."""
_moved: list[str] = []


def front_port(url: str) -> int:
    """0: the URL is no such one."""
    return int(found[0]) if (found := _PORT.search(url)) else 0


def front_moved(port: int) -> None:
    """That listener has this ``port`` now, whatever the URLs of this process say; 0: as before."""
    _moved[:] = [str(port)] if port else _moved


def present_url(url: str) -> str:
    return _PORT.sub(_moved[0], url) if _moved else url


def connect(url: str, *, timeout_s: float = 5.0, max_connections: int = 64) -> Any:
    """A ``redis.asyncio.Redis`` for ``url`` that returns bytes and follows a Sentinel's master."""
    return _client("redis.asyncio", url, timeout_s, max_connections=max_connections)


def connect_sync(url: str, *, timeout_s: float = 5.0) -> Any:
    """A blocking ``redis.Redis`` for ``url`` that returns bytes and follows a Sentinel's master."""
    return _client("redis", url, timeout_s)


def _client(package: str, url: str, timeout_s: float, **pool: int) -> Any:
    """``package``: redis or redis.asyncio. Imported on demand."""
    from redis.backoff import NoBackoff

    url = present_url(url)
    redis, retry, sentinel = (import_module(package + part) for part in ("", ".retry", ".sentinel"))
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": retry.Retry(NoBackoff(), 0),
    }
    parts = parse_sentinel(url)
    if parts is None:
        return redis.Redis.from_url(url, **options, **pool)
    options |= {"db": parts.db, "ssl": parts.tls}
    options |= {"username": parts.username, "password": parts.password}
    # Sentinels are asked with a short timeout and without the master's password.
    asked = {"socket_timeout": 1.0, "socket_connect_timeout": 1.0, "ssl": parts.tls}
    sentinels = sentinel.Sentinel(list(parts.sentinels), sentinel_kwargs=asked, **options)
    return sentinels.master_for(parts.service)


def trouble_of(error: BaseException) -> str:
    """Reason why a request to Redis failed. The server may put words before its error code."""
    words = str(error)
    if "MISCONF" in words:
        return UNWRITABLE
    if type(error).__name__ in ("OutOfMemoryError", "RedisFull") or "OOM " in words:
        return FULL
    return f"waiting for Redis ({type(error).__name__})"


def log_fields(trouble: str) -> dict[str, str]:
    """Fields of a log line: the reason, and the remedy if there is one."""
    remedy = remedy_of(trouble)
    return {"why": trouble, "remedy": remedy} if remedy else {"why": trouble}


def remedy_of(trouble: str) -> str:
    """Remedy for the user; empty if the trouble has no remedy of its own."""
    return _REMEDIES.get(trouble, "")
