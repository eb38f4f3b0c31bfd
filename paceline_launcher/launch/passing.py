"""Waits for what can pass: work that meets such an error says so, and is tried again. What a
supervisor has started goes on meanwhile."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from paceline.errors import can_pass, in_words

T = TypeVar("T")

AGAIN_S = 1.0
PROBE = ".room"
PROBE_BYTES = 64 << 10  # a process writes about that much before it has anything to lose


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
