"""Rate of committed steps: the time left, and how long a run has stalled."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from controller.replicated_controller import Controller
from controller.rest.run_index import RunIndex
from paceline.observe.progress import RATE_STEPS, seconds_left

PATIENCE_S = 0.3
"""Longest wait for an index that still reads the files of a long run; then the last rows count."""
STALLED_STEPS = 5.0
STALLED_S = 5.0
"""A run has stalled after so many usual steps and so many seconds without a commit."""


@dataclass(slots=True)
class StepRate:
    """Rate of one run by its newest steps, as of the last ``refresh``."""

    controller: Controller
    index: RunIndex
    _newest: list[dict[str, Any]] = field(default_factory=list)
    _asking: asyncio.Task[list[dict[str, Any]]] | None = None

    async def refresh(self) -> None:
        if self._asking is None or self._asking.done():
            question = self.index.ask(lambda run: run.metrics.rows(-1, RATE_STEPS))
            self._asking = asyncio.create_task(question)
        asked = self._asking
        await asyncio.wait({asked}, timeout=PATIENCE_S)
        if asked.done() and not asked.cancelled() and asked.exception() is None:
            self._newest = asked.result()

    @property
    def time_left_s(self) -> float | None:
        """Until the run's last step, by the median of the newest; None: unknown, or the run is
        over."""
        state = self.controller.state
        if state.ended:
            return None
        total = state.run_spec.steps if state.run_spec else self.controller.config.train.steps or 0
        return seconds_left(self._step_s(), state.versions.step, total)

    @property
    def last_commit_t(self) -> float | None:
        """Unix seconds; None: no commit is known."""
        rows = self._rows()
        return float(rows[-1]["t"]) if rows else None

    @property
    def stalled_s(self) -> float:
        """Time since the last commit if that is far longer than a step; else 0."""
        rows, usual = self._rows(), self._step_s()
        # If the files are behind this controller's ledger, the newest commit is younger than
        # theirs.
        behind = bool(rows) and rows[-1]["step"] < self.controller.state.versions.step
        if not usual or behind or self.controller.state.ended:
            return 0.0
        since_s = time.time() - float(rows[-1]["t"])
        return since_s if since_s > max(STALLED_S, STALLED_STEPS * median(usual)) else 0.0

    def _rows(self) -> list[dict[str, Any]]:
        """Without steps that a rollback undid: they stay in the files until they are replaced."""
        step = self.controller.state.versions.step
        return [row for row in self._newest if row["step"] <= step]

    def _step_s(self) -> list[float]:
        return [row["step_s"] for row in self._rows() if row.get("step_s") is not None]
