"""Lending policy: how many pairs of workers that share devices train, from measured waiting times.
Pure.

    step committed ──► measurement (some steps) ──► best split ──► repeated, and pays? ──► move
                            ▲                                                               │
                            └──────────────── restarts when a seat moves ◄──────────────────┘

It is kept from moving back and forth:

- The two waits measure generation per training, as for the autoscaler. A move must save
  ``LEAST_GAIN`` of the time by that number, and one that takes the last one back twice as much.
- Two measurements in a row must ask for a move to the same side.
- Training gets devices only while groups for a step wait, generation only while none do.
- In what is left of the run a move must win ``LEAST_RETURN`` times what the switch costs: devices
  that stand still for as long as a switch was measured to take.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from controller.fleet.autoscale_policy import LARGEST_SHARE, LEAST_GAIN, PATIENCE, Waits
from controller.fleet.flow_fractions import mean_of

LEAST_RETURN = 2.0


@dataclass(frozen=True, slots=True)
class Split:
    """Pairs by what they do."""

    training: int
    generating: int

    @property
    def others(self) -> Iterator["Split"]:
        """Every other split of the same pairs, the nearest first."""
        total = self.training + self.generating
        splits = [Split(n, total - n) for n in range(1, total) if n != self.training]
        return iter(sorted(splits, key=lambda split: abs(split.training - self.training)))


@dataclass(frozen=True, slots=True)
class Measured:
    """Means of some steps, and the state after the last of them."""

    waits: Waits
    ready_steps: float  # Ready groups, in steps
    left_s: float  # Until the run ends at this pace, in seconds


@dataclass(frozen=True, slots=True)
class Move:
    split: Split
    gain: float  # Fraction by which the run is expected to be faster
    why: str


def best_move(now: Split, seen: Measured, switch_s: float, least: float) -> Move | None:
    """The split that trains fastest by this measurement, and as few moves away as possible; None
    if none is faster by ``least``, or if a switch of ``switch_s`` seconds would not pay."""
    starved, throttled = (min(w, LARGEST_SHARE) for w in (seen.waits.starved, seen.waits.throttled))
    # Generation per training: 1 if neither waits.
    balance = 1.0 - starved if starved >= throttled else 1.0 / (1.0 - throttled)

    def rate(split: Split) -> float:
        generated = balance * split.generating / now.generating
        return min(split.training / now.training, generated)

    best = max(now.others, key=rate, default=now)
    gain = rate(best) / rate(now) - 1.0
    moved = best.training - now.training
    wanted = seen.ready_steps >= 1.0 if moved > 0 else seen.ready_steps < 1.0
    pairs = now.training + now.generating
    won_s = (1.0 - rate(now) / rate(best)) * seen.left_s
    pays = won_s * pairs >= LEAST_RETURN * abs(moved) * switch_s
    if gain < least or not (wanted and pays):
        return None
    why = f"replicas wait for groups {starved:.0%} of the time"
    if moved > 0:
        why = f"engines are held back by staleness {throttled:.0%} of the time"
    return Move(best, gain, why)


class Lender:
    """A move from repeated measurements. Call ``observe`` once for every committed step."""

    def __init__(self, *, steps: int) -> None:
        """``steps``: steps of one measurement, and steps skipped after a move."""
        self._steps = steps
        self._seen: list[Measured] = []
        self._split: Split | None = None
        self._skip = 0
        self._last = self._asked = 0  # Direction of the last move, and of the newest measurement
        self._agreed = 0
        self.switch_s = 0.0  # Measured seconds from a loan to its first use; 0: not yet
        self.move: Move | None = None

    def observe(self, now: Split, seen: Measured, *, settled: bool) -> None:
        """``settled``: every pair does what it is lent for."""
        self.move = None
        if now != self._split or not settled:
            if self._split is not None:
                self._last = _sign(now.training - self._split.training) or self._last
                self._skip = self._steps
            self._split = now
            self._seen.clear()
            self._agreed = 0
            return
        if self._skip:
            self._skip -= 1
            return
        self._seen.append(seen)
        if len(self._seen) < self._steps:
            return
        found = best_move(now, self._mean(), self.switch_s, LEAST_GAIN)
        self._seen.clear()
        asked = 0 if found is None else _sign(found.split.training - now.training)
        self._agreed = self._agreed + 1 if asked and asked == self._asked else 1
        self._asked = asked
        least = LEAST_GAIN * (2 if asked == -self._last else 1)
        if found is not None and self._agreed >= PATIENCE and found.gain >= least:
            self.move = found

    def _mean(self) -> Measured:
        last = self._seen[-1]
        starved = mean_of(each.waits.starved for each in self._seen)
        throttled = mean_of(each.waits.throttled for each in self._seen)
        return Measured(Waits(starved, throttled), last.ready_steps, last.left_s)


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)
