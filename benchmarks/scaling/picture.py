"""The scaling benchmark's results as a PNG."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.scaling.report import Summary, summaries
from paceline_launcher.console.plot import new_figure, save_figure

SHOWN = (16, 32)
"""Slots and groups a step of the left picture."""


def draw(found: Mapping[str, Any], out: Path) -> None:
    """Left: throughput over workers. Right: share of the ideal over groups admitted, of those
    needed."""
    figure = new_figure((10, 4.2))
    over_workers, over_groups = figure.subplots(1, 2)
    cells = list(summaries(found))
    _over_workers(over_workers, [c for c in cells if (c.slots, c.groups_per_step) == SHOWN])
    _over_groups(over_groups, cells)
    save_figure(figure, out)


def _over_workers(axes: Any, cells: list[Summary]) -> None:
    ideal = {c.rollouts: c.ideal for c in cells}
    colocated = {c.rollouts: c.colocated for c in cells}
    axes.plot(
        list(ideal), list(ideal.values()), "--", color="grey", label="ideal: generation alone"
    )
    for staleness in sorted({c.max_staleness for c in cells}, reverse=True):
        mine = [c for c in cells if c.max_staleness == staleness]
        axes.plot(
            [c.rollouts for c in mine],
            [c.median for c in mine],
            marker="o",
            label=f"max_staleness = {staleness}",
        )
    label = "colocated, the same GPUs in turns"
    axes.plot(list(colocated), list(colocated.values()), marker="s", color="black", label=label)
    axes.set_xlabel("rollout workers (as many trainer GPUs; colocated: twice as many GPUs)")
    axes.set_ylabel("tokens/s")
    axes.set_xticks(sorted(ideal))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()


def _over_groups(axes: Any, cells: list[Summary]) -> None:
    for slots in sorted({c.slots for c in cells}):
        mine = [c for c in cells if c.slots == slots and c.max_staleness > 0]
        places = [c.groups_admitted / c.groups_needed for c in mine]
        axes.plot(places, [c.median / c.ideal for c in mine], "o", label=f"{slots} slots an engine")
    axes.axvline(1.0, color="grey", linestyle="--")
    axes.axhline(0.9, color="grey", linestyle=":")
    axes.set_xlabel("groups admitted / groups that fill all slots")
    axes.set_ylabel("share of the ideal")
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.05)
    axes.grid(alpha=0.3)
    axes.legend()
