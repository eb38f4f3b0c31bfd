"""Rate of committed steps: the time left, and how long a run has stalled."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from controller.replicated_controller import Controller
from paceline.observe.progress import seconds_left

STALLED_STEPS = 5.0
STALLED_S = 5.0
"""A run has stalled after so many usual steps and so many seconds without a commit."""


@dataclass(slots=True)
class StepRate:
    """Rate of one run by its newest steps, as of the last ``refresh``."""

    controller: Controller

    async def refresh(self) -> None:
        await self.controller.context.projector.look()

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
        # If the glance is behind this controller's ledger, the newest commit is younger than its own.
        behind = bool(rows) and rows[-1]["step"] < self.controller.state.versions.step
        if not usual or behind or self.controller.state.ended:
            return 0.0
        since_s = time.time() - float(rows[-1]["t"])
        return since_s if since_s > max(STALLED_S, STALLED_STEPS * median(usual)) else 0.0

    def _rows(self) -> Sequence[Mapping[str, Any]]:
        return self.controller.context.projector.glance.steps

    def _step_s(self) -> list[float]:
        return [row["step_s"] for row in self._rows() if row.get("step_s") is not None]
