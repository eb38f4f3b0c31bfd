"""Whether a run learns and when it will be done: rewards of its steps, as a line of small bars."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from paceline.v1 import admin_pb2

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 48
PACE_STEPS = 20
"""The time left is judged by so many of the newest steps."""


class Progress:
    """Rewards and durations of the steps on the surviving line, in order of steps."""

    def __init__(self) -> None:
        self._rewards: dict[int, float] = {}
        self._seconds: dict[int, float] = {}

    @classmethod
    def of_rows(cls, rows: Iterable[Mapping[str, Any]]) -> Progress:
        """From rows of metrics.jsonl, or of the REST interface's ``steps``."""
        progress = cls()
        for row in rows:
            if row.get("kind", "step") == "step":
                progress.add(int(row["step"]), row)
        return progress

    @classmethod
    def of_run(cls, run_dir: Path) -> Progress:
        """From the run's files; empty where there are none."""
        from paceline.run_view.summary import Story

        story = Story.read(run_dir)
        return cls.of_rows(story.steps[step] for step in sorted(story.steps))

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Takes a committed step; those from it on, which a rollback undid, are forgotten."""
        if step < 1:
            return
        self.back_to(step - 1)
        reward, seconds = metrics.get("reward_mean"), metrics.get("step_s")
        if reward is not None and math.isfinite(reward):
            self._rewards[step] = float(reward)
        if seconds is not None and math.isfinite(seconds):
            self._seconds[step] = float(seconds)

    def back_to(self, step: int) -> None:
        """Forgets the steps after ``step``."""
        for known in (self._rewards, self._seconds):
            while known and next(reversed(known)) > step:
                known.popitem()

    def observe(self, status: admin_pb2.StatusReply) -> None:
        """Takes the newest step of a status, where it was not taken yet."""
        step, metrics = int(status.step), dict(status.metrics)
        self.back_to(step)
        # Right after a rollback the newest metrics are still those of a step that was undone.
        if metrics.get("step", step) == step and step not in self._rewards:
            self.add(step, metrics)

    def rewards(self, points: int) -> list[float]:
        """Mean rewards of the whole run in at most ``points`` spans of equal length."""
        return shrink(list(self._rewards.values()), points)

    def seconds_left(self, step: int, total: int) -> float | None:
        """Until ``total`` steps, by the median of the newest steps; None where none is known."""
        newest = list(islice(reversed(self._seconds.values()), PACE_STEPS))
        if not newest or total < step:
            return None
        # The median: one step that waited out a fault or a pause says nothing of the pace.
        return (total - step) * median(newest)

    def line(self, status: admin_pb2.StatusReply, width: int = WIDTH) -> str:
        """Reward sparkline with its range, and the time left."""
        shown = self.rewards(width)
        bars = f"{sparkline(shown)}  {min(shown):.3g} to {max(shown):.3g}" if shown else "-"
        left = self.seconds_left(int(status.step), int(status.total_steps))
        if left is None or status.phase in ("finished", "failed"):
            return bars
        return f"{bars}   {duration(left)} left"


def shrink(values: Sequence[float], points: int) -> list[float]:
    """``values`` as the means of at most ``points`` spans of equal length (but the last)."""
    stride = max(1, -(-len(values) // points))
    spans = (values[at : at + stride] for at in range(0, len(values), stride))
    return [math.fsum(span) / len(span) for span in spans]


def sparkline(values: Sequence[float]) -> str:
    """A bar for each value, from the lowest to the highest of them; all equal: the lowest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)


def duration(seconds: float) -> str:
    """Such as 42 s, 3 min 05 s, 2 h 07 min, 3 d 04 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"
