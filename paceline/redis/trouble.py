"""Refusals of a Redis server in words: a full memory and a full disk have a name and a remedy.

The words stand in the leader's log, in ``paceline status`` as the run's phase, and in ``paceline
why``.
"""

from __future__ import annotations

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


def trouble_of(error: BaseException) -> str:
    """Reason why a request to Redis failed. A server may put its own words before the code of a script's
    error."""
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
