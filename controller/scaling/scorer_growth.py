"""Growth of a scorer's workers while they hold the trainers up. Pure.

    step committed ──► a scorer is the bottleneck? ──► for as many steps as a proposal of the
                                                       roles takes ──► proposal

Scorers only grow: nothing tells how many of them a faster fleet would need.
"""

import math
from dataclasses import dataclass

from controller.fleet.autoscale_policy import LARGEST_SHARE, MOST_GROWTH


@dataclass(frozen=True, slots=True)
class Bound:
    pool: str
    workers: int  # Desired ones, all of them at work
    starved: float  # Share of a step that replicas wait for groups. 0 to 1.


class ScorerGrowth:
    """Call ``observe`` once for every committed step."""

    def __init__(self, most: int | None, *, steps: int, high: float) -> None:
        """``most``: workers of a scorer; None: no limit. ``steps``: in a row with the same find."""
        self._most, self._steps, self._high = most, steps, high
        self._last: tuple[str, int] | None = None
        self._agreed = 0
        self.proposal: tuple[str, int] | None = None
        """Pool and number of workers; None if no change is proposed."""

    def observe(self, bound: Bound | None) -> None:
        self.proposal = None
        if bound is None or bound.starved < self._high:
            self._last, self._agreed = None, 0
            return
        now = (bound.pool, bound.workers)
        self._agreed = self._agreed + 1 if now == self._last else 1
        self._last = now
        wanted = self._wanted(bound)
        if self._agreed >= self._steps and wanted > bound.workers:
            self.proposal = (bound.pool, wanted)

    def _wanted(self, bound: Bound) -> int:
        """Workers to add, as many as the trainers could use, by proportion."""
        wanted = math.ceil(bound.workers / (1.0 - min(bound.starved, LARGEST_SHARE)) - 1e-9)
        wanted = min(max(wanted, bound.workers + 1), bound.workers * MOST_GROWTH)
        return wanted if self._most is None else min(wanted, self._most)
