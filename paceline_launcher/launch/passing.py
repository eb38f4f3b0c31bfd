"""Errors of the system that can pass: work that meets one waits, says so, and is tried again.

A full disk, or a limit of descriptors, processes or memory, is nobody's bad input: what a
supervisor has started goes on meanwhile, and the run is not over because of it.
"""

import asyncio
import contextlib
import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

AGAIN_S = 1.0
PROBE = ".room"
PROBE_BYTES = 64 << 10  # a process writes about that much before it has anything to lose
REMEDIES = {
    errno.ENOSPC: "Free space on that disk",
    errno.EDQUOT: "Free space, or have the quota raised",
    errno.EMFILE: "Raise the limit of open files (ulimit -n, LimitNOFILE)",
    errno.ENFILE: "Raise fs.file-max, or end processes with many open files",
    errno.EAGAIN: "Raise the limit of processes (ulimit -u, pids.max of the container)",
    errno.ENOMEM: "End other processes, or give this machine or container more memory",
}
"""Remedies by the number of the error."""


def can_pass(error: BaseException) -> bool:
    if isinstance(error, RuntimeError):
        return "start new thread" in str(error)  # EAGAIN, as Python tells it of threads
    return isinstance(error, MemoryError) or getattr(error, "errno", None) in REMEDIES


def in_words(error: BaseException, path: Path | None = None) -> str:
    """An error with its path and its remedy. ``path``: if the error names none."""
    number = getattr(error, "errno", None)
    if number is None:
        number = errno.ENOMEM if isinstance(error, MemoryError) else errno.EAGAIN
    place = getattr(error, "filename", None) or path
    remedy = REMEDIES.get(number, "")
    words = f"{os.strerror(number)}{f': {place}' if place else ''}"
    return f"{words}. {remedy}" if remedy else words


def check_room(directory: Path) -> None:
    """Raises OSError if the disk of ``directory`` has no room for the files of a process."""
    probe = directory / PROBE
    try:
        probe.write_bytes(bytes(PROBE_BYTES))
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)


async def is_set_within(limit_s: float, event: asyncio.Event) -> bool:
    """True once ``event`` is set, False after ``limit_s``."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            return await event.wait()
    return False


class Passing:
    """Work that waits out what can pass, until ``ending`` is set."""

    def __init__(self, note: Callable[[str], None], ending: asyncio.Event) -> None:
        self._note, self._ending = note, ending
        self._said: set[str] = set()
        """Troubles that have been noted and not passed: each is told once, whoever meets it."""

    async def done(
        self, what: str, work: Callable[[], Awaitable[T]], path: Path | None = None
    ) -> T | None:
        """Result of ``work``, which is repeated; None if the end came first. Other errors pass
        through. ``path``: what it works on."""
        trouble = ""
        while True:
            try:
                result = await work()
            except Exception as error:
                if not can_pass(error):
                    raise
                trouble = in_words(error, path)
                if trouble not in self._said:
                    self._said.add(trouble)
                    self._note(f"paused: {what}: {trouble}; it is tried again until that passes")
            else:
                if trouble in self._said:
                    self._said.discard(trouble)
                    self._note(f"{what}: it goes on")
                return result
            if await is_set_within(AGAIN_S, self._ending):
                return None
