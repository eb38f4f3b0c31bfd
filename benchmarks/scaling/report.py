"""Rows of the scaling table, from its results."""

import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

HEADER = [
    "rollout workers",
    "`max_staleness`",
    "slots",
    "groups a step",
    "groups admitted / needed",
    "tokens/s",
    "of ideal",
    "against colocated",
    "runs",
]


def colocated_key(rollouts: int, slots: int, groups: int) -> str:
    """Key of the baseline with the GPUs of ``rollouts`` workers and of their trainer."""
    return f"{2 * rollouts} GPUs, {slots} slots, {groups} groups"


def rows(found: Mapping[str, Any]) -> list[list[object]]:
    cells: dict[tuple[int, int, bool, int, int], list[dict[str, Any]]] = defaultdict(list)
    for run in found["runs"]:
        turns = run.get("turns", False)
        key = run["groups_per_step"], run["slots"], turns, run["rollouts"], run["max_staleness"]
        cells[key].append(run)
    table: list[list[object]] = []
    for (groups, slots, turns, rollouts, staleness), runs in sorted(cells.items()):
        rates = [run["tokens_per_s"] for run in runs]
        ideal = rollouts * found["alone"][str(slots)]
        half = rollouts // 2 if turns else rollouts
        colocated = found["colocated"][colocated_key(half, slots, groups)]
        admitted = f"{runs[0]['groups_admitted']} / {runs[0]['groups_needed']:.0f}"
        who = f"{rollouts}, in turns" if turns else rollouts
        cell = [who, staleness, slots, groups, admitted, f"{statistics.median(rates):,.0f}"]
        table.append([*cell, _ratio(rates, ideal), _ratio(rates, colocated), len(rates)])
    return table


def _ratio(rates: list[float], reference: float) -> str:
    """The median of the rates against the reference, with the least if there are several."""
    median = f"{statistics.median(rates) / reference:.2f}"
    return f"{median} (least {min(rates) / reference:.2f})" if len(rates) > 1 else median
