"""Limits of waits in tests, which grow with the load of the machine.

Such a limit ends a test that hangs. A machine with ten times as much to do as it has cores takes
ten times as long, and that is no fault of what is tested.
"""

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


def until(
    true: Callable[[], object],
    limit_s: float,
    *,
    every_s: float = 0.1,
    goes_on: Callable[[], None] = lambda: None,
    said: Callable[[], str] = str,
) -> None:
    """Polls until ``true()``. Raises AssertionError after ``limit_s`` of an idle machine, and what
    ``goes_on`` raises.

    A question that takes long, as a command in a process of its own does, is asked less often: else
    it would take from what it waits for the time that this needs.
    """
    patience = Patience(limit_s)
    while True:
        begun = time.monotonic()
        if true():
            return
        took_s = time.monotonic() - begun
        goes_on()
        assert patience.left(), f"it never became true:\n{said()}"
        time.sleep(max(every_s, 2 * took_s))
