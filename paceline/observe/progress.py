"""Reward sparkline and time left of a run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from paceline.observe.curves import MetricStore
from paceline.v1 import admin_pb2

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 48
RATE_STEPS = 20  # The time left is estimated from so many of the newest steps


@dataclass(slots=True)
class Progress:
    """Rewards and durations of the steps on the surviving line, in ``metrics``."""

    metrics: MetricStore = field(default_factory=MetricStore)

    def observe(self, status: admin_pb2.StatusReply) -> None:
        """Takes the newest step of a status, unless it is known."""
        step, metrics = int(status.step), dict(status.metrics)
        self.metrics.cut(step)
        known = bool(self.metrics.steps) and self.metrics.steps[-1] == step
        # Right after a rollback the newest metrics are still those of a step that was undone.
        if step and metrics and not known and metrics.get("step", step) == step:
            self.metrics.append({**metrics, "step": step})

    def rewards(self, points: int) -> list[float]:
        """Mean rewards of the whole run in at most ``points`` spans of equal length (but the
        last)."""
        values = [reward for _, reward in self.metrics.column("reward_mean")]
        stride = max(1, -(-len(values) // points))
        spans = (values[at : at + stride] for at in range(0, len(values), stride))
        return [math.fsum(span) / len(span) for span in spans]

    def seconds_left(self, step: int, total: int) -> float | None:
        """Time until ``total`` steps; None if unknown."""
        newest = self.metrics.column("step_s", RATE_STEPS)
        # The first step of a run waits for the first groups, and for kernels to warm up.
        return seconds_left([seconds for at, seconds in newest if at > 1], step, total)

    def line(self, status: admin_pb2.StatusReply, width: int = WIDTH) -> str:
        shown = self.rewards(width)
        bars = f"{sparkline(shown)}  {min(shown):.3g} to {max(shown):.3g}" if shown else "-"
        left = self.seconds_left(int(status.step), int(status.total_steps))
        if left is None or status.phase in ("finished", "failed"):
            return bars
        return f"{bars}   {duration(left)} left"


def seconds_left(step_s: Sequence[float], step: int, total: int) -> float | None:
    """Time until ``total`` steps, by the median of ``step_s``; None if that is empty."""
    # The median: one step that waited for a fault to be repaired says nothing about the rate.
    return (total - step) * median(step_s) if step_s and total >= step else None


def sparkline(values: Sequence[float]) -> str:
    """A bar for each value (one at least), from the lowest to the highest; the lowest bar if all
    are equal."""
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)


def duration(seconds: float) -> str:
    """A duration in two units: 42 s, 3 min 05 s, 2 h 07 min, 3 d 04 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"
