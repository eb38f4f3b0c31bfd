"""Restart policy of a process that has ended. Pure: time and evidence are arguments.

- Bad input (exit status 2) of the first process of its name ends the run: a restart would fail
  again. Of a later one it is a failure like others: what was good input has changed meanwhile, and
  may change back.
- A process that ends for the first time restarts at once. Each further time it waits longer, up to
  a limit that is short if it was killed from outside.
- A process that keeps failing before it is at work or right after its start, or too often in the
  window, ends the run. An engine that dies while it generates gets twice the attempts: the prompt
  that kills it is dropped.
- No failure counts as long as another process of its kind does well.
- A process that met what can pass is started again however often.
"""

import signal
from collections import defaultdict, deque

from paceline.process.lifetime import ENGINE_LOST, TRY_AGAIN

WINDOW_S = 600.0
FIRST_DELAY_S = 0.5
LAST_DELAY_S = 15.0
LAST_DELAY_KILLED_S = 2.0
KILLED = (-signal.SIGKILL, -signal.SIGTERM)
CALM_S = 60.0  # a process that lived this long starts again without delay
QUICK_FAILURES = 5  # this many failures in a row, each within CALM_S, end the run

BAD_INPUT = 2


class GiveUp(Exception):
    """The run cannot go on. The message is the reason."""


class RestartPolicy:
    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._ends: dict[str, deque[float]] = defaultdict(deque)
        self._quick: dict[str, int] = defaultdict(int)
        self._stood: set[str] = set()
        """Names whose first process has been no bad input."""
        self._failed: dict[str, int] = defaultdict(int)

    def stands(self, name: str) -> None:
        """A process of that name runs that an earlier launcher has started."""
        self._stood.add(name)

    def delay_s(
        self, name: str, exit_code: int, lived_s: float, now: float, *, spare: bool = False
    ) -> float:
        """Time until process ``name``, which ended with ``exit_code`` (negative: a signal), starts
        again. ``lived_s``: how long it lived, 0 if it was never at work. ``spare``: the run goes on
        without it, however often it fails. Raises GiveUp."""
        if exit_code == BAD_INPUT and name not in self._stood:
            raise GiveUp("was given bad input")
        self._stood.add(name)
        passes = exit_code == TRY_AGAIN
        ends = self._ends[name]
        ends.append(now)
        while ends[0] < now - WINDOW_S:
            ends.popleft()
        if spare:
            # Nor are these failures held against it once the others have gone.
            ends.clear()
        if len(ends) > self._max_restarts and not passes:
            raise GiveUp(
                f"ended {len(ends)} times within ten minutes (fleet.max_restarts = "
                f"{self._max_restarts})"
            )
        self._quick[name] = self._quick[name] + 1 if lived_s < CALM_S else 1
        # A signal is no sign of a faulty set-up; repeated failures of its own are.
        failed = exit_code > 0 and lived_s < CALM_S and not (spare or passes)
        self._failed[name] = self._failed[name] + 1 if failed else 0
        limit = 2 * QUICK_FAILURES if exit_code == ENGINE_LOST else QUICK_FAILURES
        if self._failed[name] >= limit:
            raise GiveUp(f"failed {limit} times in a row, each before or soon after it was at work")
        again = self._quick[name] - 1
        longest = LAST_DELAY_KILLED_S if exit_code in (*KILLED, ENGINE_LOST) else LAST_DELAY_S
        return 0.0 if again == 0 else min(FIRST_DELAY_S * 2 ** (again - 1), longest)
