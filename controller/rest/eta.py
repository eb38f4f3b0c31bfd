"""How fast steps are committed: the time left, and for how long nothing has been."""

from __future__ import annotations

import asyncio
import time
from statistics import median
from typing import TYPE_CHECKING, Any

from controller.rest.run_index import RunIndex
from paceline.run_view.eta import PACE_STEPS, Progress

if TYPE_CHECKING:
    from controller.replicated_controller import Controller

PATIENCE_S = 0.3
"""An index that still reads a long run's files is not waited for: what was known counts."""
STALLED_STEPS = 5.0
STALLED_S = 5.0
"""Without a commit for so many usual steps, and so many seconds, a run has stalled."""


class StepRate:
    """Of one run, from its newest steps. ``look`` first: it renews what the others judge by."""

    def __init__(self, controller: Controller, index: RunIndex) -> None:
        self._controller = controller
        self._index = index
        self._rows: list[dict[str, Any]] = []
        self._asking: asyncio.Task[list[dict[str, Any]]] | None = None

    async def look(self) -> None:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._index.ask(_newest))
        asked = self._asking
        await asyncio.wait({asked}, timeout=PATIENCE_S)
        if asked.done() and not asked.cancelled() and asked.exception() is None:
            self._rows = asked.result()

    @property
    def left_s(self) -> float | None:
        """Seconds until the run's last step, by the median of the newest; None: not known, or over."""
        state = self._controller.state
        if state.ended:
            return None
        progress = Progress.of_rows(self._line())
        total = state.facts.steps if state.facts else self._controller.config.train.steps
        return progress.seconds_left(state.versions.step, total)

    @property
    def last_commit_t(self) -> float | None:
        """Unix seconds; None: nothing is known to be committed."""
        rows = self._line()
        return float(rows[-1]["t"]) if rows else None

    @property
    def stalled_s(self) -> float:
        """Seconds since the last commit, where that is far longer than a step; else 0."""
        rows = self._line()
        usual = [float(row["step_s"]) for row in rows if row.get("step_s") is not None]
        # A commit that this controller has, and its files not yet, is a new one.
        behind = bool(rows) and rows[-1]["step"] < self._controller.state.versions.step
        if not usual or behind or self._controller.state.ended:
            return 0.0
        since_s = time.time() - float(rows[-1]["t"])
        return since_s if since_s > max(STALLED_S, STALLED_STEPS * median(usual)) else 0.0

    def _line(self) -> list[dict[str, Any]]:
        """Steps that a rollback undid stand in the files until others take their place."""
        step = self._controller.state.versions.step
        return [row for row in self._rows if row["step"] <= step]


def _newest(index: RunIndex) -> list[dict[str, Any]]:
    return index.columns.rows(-1, PACE_STEPS)
