"""Longest time in which this process did not run at all: it was stopped, frozen, or its machine
was."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

LOOK_S = 0.25
IDLE_SHARE = 0.1
"""A process whose event loop is only blocked by its own work has used more of the time."""


class StallWatch:
    """``look`` is to be called every LOOK_S; ``run`` does so."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.process_time,
    ) -> None:
        """``used``: CPU seconds of the process."""
        self._clock, self._used = clock, used
        self._seen = clock(), used()
        self._longest_s = 0.0

    def look(self) -> None:
        before, used_before = self._seen
        self._seen = now, used = self._clock(), self._used()
        gap_s = now - before - LOOK_S
        if gap_s > 0 and used - used_before < IDLE_SHARE * gap_s:
            self._longest_s = max(self._longest_s, gap_s)

    def take(self) -> float:
        """Seconds, since the last call."""
        self.look()
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()
