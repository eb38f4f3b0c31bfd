"""Rows of the scaling table, from its results."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Summary:
    """Of the runs of one cell."""

    rollouts: int
    max_staleness: int
    slots: int
    groups_per_step: int
    groups_admitted: int
    groups_needed: float
    rates: tuple[float, ...]
    """Tokens per second, ascending."""
    ideal: float
    """Workers times the rate of one engine alone."""
    colocated: float
    """The same GPUs in turns."""

    @property
    def least(self) -> float:
        return self.rates[0]

    @property
    def median(self) -> float:
        return statistics.median(self.rates)


def colocated_key(rollouts: int, slots: int, groups: int) -> str:
    """Of the baseline with the GPUs of ``rollouts`` workers and of their trainer."""
    return f"{2 * rollouts} GPUs, {slots} slots, {groups} groups"


def summaries(found: Mapping[str, Any]) -> Iterator[Summary]:
    cells: dict[tuple[int, int, int, int], list[dict[str, Any]]] = defaultdict(list)
    for run in found["runs"]:
        key = run["groups_per_step"], run["slots"], run["rollouts"], run["max_staleness"]
        cells[key].append(run)
    for (groups, slots, rollouts, staleness), made in sorted(cells.items()):
        yield Summary(
            rollouts,
            staleness,
            slots,
            groups,
            made[0]["groups_admitted"],
            made[0]["groups_needed"],
            tuple(sorted(run["tokens_per_s"] for run in made)),
            rollouts * found["alone"][str(slots)],
            found["colocated"][colocated_key(rollouts, slots, groups)],
        )


def rows(found: Mapping[str, Any]) -> list[list[object]]:
    return [
        [
            one.rollouts,
            one.max_staleness,
            one.slots,
            one.groups_per_step,
            f"{one.groups_admitted} / {one.groups_needed:.0f}",
            f"{one.median:,.0f}",
            _spread(one, one.ideal),
            _spread(one, one.colocated),
            len(one.rates),
        ]
        for one in summaries(found)
    ]


def _spread(one: Summary, reference: float) -> str:
    """The median, with the least if there are several runs."""
    said = f"{one.median / reference:.2f}"
    return f"{said} (least {one.least / reference:.2f})" if len(one.rates) > 1 else said
