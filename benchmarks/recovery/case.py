"""Outcome of one trial of a fault, and readings of the journal that trials share."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from testbed.fleets.fleet import Event, Fleet

SERVE_LIMIT_S = 90.0
"""A process starts anew and loads its model, on busy cores."""


@dataclass(frozen=True, slots=True)
class Trial:
    detect_s: float | None
    recover_s: float
    repeated: str = "none"
    """Work done again."""
    joined_s: float | None = None
    """Time from the replacement's registration (its model is loaded) to its first share of work."""


Inject = Callable[[Any], Trial]
"""Injects a fault into the fleet of its ground, and reads what came of it."""


def kind(name: str) -> Callable[[Event], bool]:
    return lambda e: bool(e["type"] == name)


def of_worker(name: str, worker_id: str) -> Callable[[Event], bool]:
    return lambda e: e["type"] == name and e.get("worker_id") == worker_id


def between(watch: Fleet, start: int, end: int, name: str) -> list[Event]:
    return [e for _, e in watch.tail.events[start:end] if e["type"] == name]


def commit_after(watch: Fleet, t0: float, at: int, limit_s: float = 60.0) -> tuple[float, int]:
    """(time, index) of the first step that was committed after ``t0``, looking from ``at`` on."""
    while True:
        t, _, at = watch.first(kind("StepCommitted"), at, limit_s)
        if t > t0:
            return t, at


def released_and_leased(watch: Fleet, worker_id: str, at: int) -> tuple[int, float]:
    """Number of tasks that the dead worker held, and time at which another one had the last."""
    watch.mark()
    released = [
        e["task_id"]
        for e in between(watch, at, len(watch.tail.events), "TaskReleased")
        if e["worker_id"] == worker_id
    ]
    last = 0.0
    for task_id in released:
        t, *_ = watch.first(_leases(worker_id, task_id), at)
        last = max(last, t)
    return len(released), last


def _leases(not_to: str, task_id: str) -> Callable[[Event], bool]:
    return lambda e: (
        e["type"] == "TasksLeased"
        and e["worker_id"] != not_to
        and any(lease[0] == task_id for lease in e["leases"])
    )


def longest_gap(watch: Fleet, at: int) -> float:
    """Longest time between two commits since ``at``, in seconds."""
    watch.mark()
    times = [t for t, e in watch.tail.events[at:] if e["type"] == "StepCommitted"]
    return max((b - a for a, b in pairwise(times)), default=0.0)
