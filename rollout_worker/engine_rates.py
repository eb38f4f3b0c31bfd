"""Rates of the engine, from differences of its counters."""

from __future__ import annotations

import time
from collections import deque

from paceline.process.worker_resources import Resources
from rollout_worker.engine.base import Engine, EngineStats

WINDOW_S = 5.0


class EngineRates:
    """Rates over the last few seconds. Read on every report."""

    def __init__(self, engine: Engine, slots: int) -> None:
        """``slots``: sequences that the engine can run at once."""
        self._engine = engine
        self._slots = slots
        self._resources = Resources()
        self._readings: deque[tuple[float, EngineStats]] = deque()
        self.sequences_per_s = 0.0

    def read(self) -> dict[str, float]:
        """tokens_per_s, samples_per_s, engine_idle_fraction, running, waiting, slot_occupancy
        (share of the slots in use, mean of the readings), swap_s (total time that generation was
        paused for weights), and those of ``Resources``."""
        now, stats = time.monotonic(), self._engine.stats()
        self._readings.append((now, stats))
        while len(self._readings) > 2 and self._readings[1][0] < now - WINDOW_S:
            self._readings.popleft()
        then, before = self._readings[0]
        span = now - then
        gauges = {
            "running": float(stats.running),
            "waiting": float(stats.waiting),
            "slot_occupancy": sum(min(s.running, self._slots) for _, s in self._readings)
            / (len(self._readings) * self._slots),
            "swap_s": stats.swap_s,
            **self._resources.read(),
        }
        if span > 0.05:
            self.sequences_per_s = (stats.samples - before.samples) / span
            gauges["tokens_per_s"] = (stats.tokens - before.tokens) / span
            gauges["samples_per_s"] = self.sequences_per_s
            gauges["engine_idle_fraction"] = min(1.0, (stats.idle_s - before.idle_s) / span)
        gauges.update(stats.extra)
        return gauges
