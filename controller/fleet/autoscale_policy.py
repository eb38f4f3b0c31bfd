"""Autoscaling policy: worker counts proposed from measured waiting times. Pure.

    step committed ──► measurement (mean over some steps) ──► propose ──► repeated? ──► proposal
                            ▲                                              │
                            └──── restarts when the fleet changes ◄────────┘

- *starved* is the fraction of a step that replicas wait for groups. *throttled* is the fraction of
  time that rollout engines are idle because the next task would be too stale. At most one is large.
- Both measure one number: rollout capacity per trainer capacity. A change is proposed only if, by
  that number, it reduces the waiting. Applied proposals therefore approach balance and come to an
  end.
- The slower role grows. If its limit forbids that, the role that waits for it shrinks. If the
  measured times stay constant, no role ever both grows and shrinks.
- If the groups that replicas wait for wait for a scorer, that scorer grows, and no role changes.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from controller.fleet.flow_fractions import mean_of

HIGH = 0.25  # Fraction of time that one role waits for the other from which a change is proposed
PATIENCE = 2  # Consecutive measurements that must propose the same move
LEAST_GAIN = 0.05  # Fraction of time that a change must save
LARGEST_SHARE = 0.9
"""Limit of measured waiting: a larger value would ask for over ten times the workers."""
MOST_GROWTH = 2  # Largest growth factor of a role in one proposal


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    policy: int
    rollout: int


@dataclass(frozen=True, slots=True)
class ScaleBounds:
    """Minimum and maximum workers by role. A maximum of None is no limit."""

    policy: tuple[int, int | None]
    rollout: tuple[int, int | None]
    scorers: int | None = None  # Most workers of one scorer


@dataclass(frozen=True, slots=True)
class Waits:
    """Fractions of time, 0 to 1."""

    starved: float
    throttled: float
    scorer: tuple[str, int] | None = None
    """Pool and workers of the scorer that the groups wait for; None: for none."""


@dataclass(frozen=True, slots=True)
class Proposal:
    counts: WorkerCounts
    why: str
    scorers: Mapping[str, int] = field(default_factory=dict)

    @property
    def desired(self) -> dict[str, int]:
        return asdict(self.counts) | dict(self.scorers)


def propose(now: WorkerCounts, limits: ScaleBounds, waits: Waits) -> Proposal | None:
    """A better fleet by this measurement; None if waiting is below ``HIGH`` or none is better."""
    starved = min(waits.starved, LARGEST_SHARE)
    throttled = min(waits.throttled, LARGEST_SHARE)
    if max(starved, throttled) < HIGH:
        return None
    if waits.scorer is not None:
        pool, workers = waits.scorer
        # As many as the trainers could use, by proportion.
        wanted = max(math.ceil(workers / (1.0 - starved) - 1e-9), workers + 1)
        wanted = min(wanted, workers * MOST_GROWTH, limits.scorers or wanted)
        why = f"replicas wait for groups {starved:.0%} of the time, and these for {pool}"
        return Proposal(now, why, {pool: wanted}) if wanted > workers else None
    if starved >= throttled:
        balance = 1.0 - starved
        why = f"replicas wait for groups {starved:.0%} of the time"
        moves = [_grow(now, "rollout", limits.rollout), _shrink(now, "policy", limits.policy)]
    else:
        balance = 1.0 / (1.0 - throttled)
        why = f"rollout engines are held back by staleness {throttled:.0%} of the time"
        moves = [_grow(now, "policy", limits.policy), _shrink(now, "rollout", limits.rollout)]
    for candidates in moves:
        # Among equally good candidates min keeps the first, which is the smallest.
        ordered = sorted(candidates, key=lambda c: c.policy + c.rollout)
        best = min(ordered, key=lambda c: waiting(balance, now, c), default=now)
        if waiting(balance, now, best) <= waiting(balance, now, now) - LEAST_GAIN:
            return Proposal(best, why)
    return None


def waiting(balance: float, now: WorkerCounts, then: WorkerCounts) -> float:
    """Fraction of time that the waiting role would wait with ``then`` workers. ``balance``: rollout
    capacity over trainer capacity with ``now`` workers. Capacity is assumed to be proportional to
    workers."""
    after = balance * (then.rollout / now.rollout) / (then.policy / now.policy)
    return 1.0 - min(after, 1.0 / after)


def _grow(now: WorkerCounts, role: str, limit: tuple[int, int | None]) -> list[WorkerCounts]:
    have = getattr(now, role)
    most = have * MOST_GROWTH if limit[1] is None else min(have * MOST_GROWTH, limit[1])
    return [replace(now, **{role: count}) for count in range(have + 1, most + 1)]


def _shrink(now: WorkerCounts, role: str, limit: tuple[int, int | None]) -> list[WorkerCounts]:
    least = max(1, limit[0])
    return [replace(now, **{role: count}) for count in range(least, getattr(now, role))]


class Autoscaler:
    """Proposals from repeated measurements. Call ``observe`` once for every committed step."""

    def __init__(self, limits: ScaleBounds, *, steps: int) -> None:
        """``steps``: steps of one measurement, and steps skipped after a change of the fleet."""
        self._limits = limits
        self._steps = steps
        self._counts: WorkerCounts | None = None
        self._skip = 0
        self._seen: list[Waits] = []
        self._move: set[tuple[str, bool]] = set()
        """Pools of the last proposal, and if each is to grow."""
        self._agreed = 0
        self.proposal: Proposal | None = None  # The current proposal; None if no change is proposed

    def observe(self, counts: WorkerCounts, waits: Waits, *, settled: bool) -> None:
        """``counts``: desired workers. ``settled``: exactly these are active."""
        if counts != self._counts or not settled:
            if self._counts is not None:
                self._skip = self._steps
            self._counts = counts
            self._seen.clear()
            self._move, self._agreed, self.proposal = set(), 0, None
            return
        if self._skip:
            self._skip -= 1
            return
        if self._seen and self._seen[-1].scorer != waits.scorer:
            self._seen.clear()
        self._seen.append(waits)
        if len(self._seen) < self._steps:
            return
        starved = mean_of(w.starved for w in self._seen)
        throttled = mean_of(w.throttled for w in self._seen)
        self._seen.clear()
        mean = Waits(starved, throttled, waits.scorer)
        found = propose(counts, self._limits, mean)
        before, desired = asdict(counts), found.desired if found is not None else {}
        move = {(p, n > before.get(p, 0)) for p, n in desired.items() if n != before.get(p)}
        self._agreed = self._agreed + 1 if move and move == self._move else 1
        self._move = move
        self.proposal = found if self._agreed >= PATIENCE else None
