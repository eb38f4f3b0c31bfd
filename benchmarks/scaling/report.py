"""Formatting of the scaling benchmark's results as rows of the tables in the documentation."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

HEADER = [
    "rollout workers",
    "`max_staleness`",
    "slots",
    "groups a step",
    "groups admitted / needed",
    "tokens/s",
    "of ideal",
    "runs",
]


def rows(found: Mapping[str, Any]) -> list[list[object]]:
    cells: dict[tuple[int, int, int, int], list[dict[str, Any]]] = defaultdict(list)
    for run in found["runs"]:
        key = run["groups_per_step"], run["slots"], run["rollouts"], run["max_staleness"]
        cells[key].append(run)
    table: list[list[object]] = []
    for (groups, slots, rollouts, staleness), runs in sorted(cells.items()):
        rates = [run["tokens_per_s"] for run in runs]
        ideal = rollouts * found["alone"][str(slots)]
        admitted = f"{runs[0]['groups_admitted']} / {runs[0]['groups_needed']:.0f}"
        cell = [rollouts, staleness, slots, groups, admitted, f"{statistics.median(rates):,.0f}"]
        table.append([*cell, _ratio(rates, ideal), len(rates)])
    return table


ARMS = {
    ("none", 2): "split, asynchronous",
    ("turns", 0): "turns, synchronous",
    ("turns", 2): "turns, running ahead",
}
"""What is compared on the same devices, by sharing and staleness."""


def choices(found: Mapping[str, Any], step: str) -> dict[int, dict[str, float]]:
    """Median tokens/s of each arm by devices, with steps of this size."""
    rates: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in found["runs"]:
        if run["what"] == "choice" and run["step"] == step:
            arm = ARMS[run["sharing"], run["max_staleness"]]
            rates[run["devices"]][arm].append(run["tokens_per_s"])
    return {
        devices: {arm: statistics.median(rates[devices][arm]) for arm in rates[devices]}
        for devices in sorted(rates)
    }


def loans(found: Mapping[str, Any]) -> Iterable[list[object]]:
    """Rows of the table of lending: each split at the start, fixed and lent."""
    runs: dict[tuple[float, int, int, float], dict[str, list[dict[str, Any]]]] = {}
    for run in found["runs"]:
        if run["what"] == "lending":
            window_s = round(run["seconds"], -1)  # A run ends with a step
            key = run["update_s"], run["devices"], run["training"], window_s
            runs.setdefault(key, defaultdict(list))[run["sharing"]].append(run)
    for (update_s, devices, training, window_s), sides in sorted(runs.items()):
        if len(sides) < 2:
            continue  # Cut short
        row: list[object] = [f"{1000 * update_s:g} ms", f"{training} + {devices - training}"]
        fixed = statistics.median(run["tokens_per_s"] for run in sides["none"])
        row.append(f"{fixed:,.0f}")
        for name in ("tokens_per_s", "settled_tokens_per_s"):
            rates = [run[name] for run in sides["lend"]]
            row.append(f"{statistics.median(rates):,.0f} = {_ratio(rates, fixed)}")
        moves = [move for run in sides["lend"] for move in run["moves"]]
        row.append(", ".join(f"{seats} after {after:.0f} s" for after, seats, _ in moves) or "none")
        yield [*row, f"{window_s:.0f} s", len(sides["lend"])]


def _ratio(rates: list[float], reference: float) -> str:
    """The median of the rates against the reference, with the least if there are several."""
    median = f"{statistics.median(rates) / reference:.2f}"
    return f"{median} (least {min(rates) / reference:.2f})" if len(rates) > 1 else median
