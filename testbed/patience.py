"""Limits of waits in tests, which grow with the load of the machine.

Such a limit ends a test that hangs. A machine with ten times as much to do as it has cores takes ten times as long,
and that is no fault of what is tested.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable


def slowness() -> float:
    """Runnable threads a core in the last minute, at least 1."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def patient(seconds: float) -> float:
    """``seconds`` of an idle machine on this one, as loaded as it is now."""
    return seconds * slowness()


class Patience:
    """``seconds`` of an idle machine. The load may change while they pass."""

    def __init__(
        self,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        slow: Callable[[], float] = slowness,
    ) -> None:
        self._left_s = seconds
        self._clock, self._slow = clock, slow
        self._at = clock()

    def left(self) -> bool:
        now = self._clock()
        self._left_s -= (now - self._at) / self._slow()
        self._at = now
        return self._left_s > 0
