"""Ranks of a replica that the kernel does not run: stopped, or in an uninterruptible wait.

Rank 0 waits for them in a collective, and its reports go on. So it alone can say whose fault the
wait is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from paceline.process.kernel_state import kernel_state
from paceline.process.waits import LEAST_AGE_S, Wait, WaitKind


class StuckRanks:
    """Asked for each report: one read of /proc for each rank of this host."""

    def __init__(self, pids: Sequence[int]) -> None:
        """``pids``: of the ranks from 1 on."""
        self._pids = pids
        self._since: dict[int, float] = {}

    def waits(self, least_s: float = LEAST_AGE_S) -> list[Wait]:
        """One for each rank that was found so at every question of at least the last ``least_s``."""
        found, now = [], time.monotonic()
        for rank, pid in enumerate(self._pids, 1):
            state = kernel_state(pid)
            if state is None or not (state.stopped or state.uninterruptible):
                self._since.pop(rank, None)
                continue
            age_s = now - self._since.setdefault(rank, now)
            how = "stopped" if state.stopped else state.words
            if age_s >= least_s:
                found.append(Wait(WaitKind.RANK, f"rank {rank}, {how}", str(pid), age_s))
        return found
