"""Best division of so many GPUs between policy and rollout, and the least staleness that is as
fast."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from testbed.planner.pace import SimulatedPace, asynchronous, synchronous
from testbed.planner.system import System

STALENESS = (1, 2, 4, 8)
AS_FAST = 0.95
"""Of the best pace: a smaller staleness that reaches it is preferred."""
SYNC_BATCHES = 8


@dataclass(frozen=True, slots=True)
class Variant:
    """Paces of one variant of the system on the chosen division."""

    asynchronous: SimulatedPace
    synchronous: SimulatedPace
    """The same GPUs, all of them for generation and then all for training."""

    @property
    def ratio(self) -> float:
        return self.asynchronous.samples_per_s / self.synchronous.samples_per_s


@dataclass(frozen=True, slots=True)
class SizePlan:
    gpus: int
    policy_gpus: int
    rollout_gpus: int
    max_staleness: float
    variants: tuple[Variant, ...]

    def span(self, of: Callable[[Variant], float]) -> tuple[float, float]:
        """Lowest and highest of the variants."""
        values = [of(variant) for variant in self.variants]
        return min(values), max(values)


class NoSplit(ValueError):
    """No division of the GPUs gives both sides whole replicas and whole engines."""


def splits(gpus: int, policy_ranks: int, tp: int) -> list[int]:
    """GPUs for policy, in rising order: whole replicas, and whole engines with the rest."""
    whole = [p for p in range(policy_ranks, gpus, policy_ranks) if gpus - p >= tp]
    if not whole:
        raise NoSplit(
            f"{gpus} GPUs hold no policy replica of {policy_ranks} ranks beside an engine of {tp} "
            f"GPUs"
        )
    unused = min((gpus - p) % tp for p in whole)
    return [p for p in whole if (gpus - p) % tp == unused]


def best_size(
    systems: Sequence[System],
    gpus: int,
    policy_ranks: int,
    *,
    staleness: Sequence[float] = STALENESS,
    log_prob: bool = False,
    baseline_log_prob: bool = False,
) -> SizePlan:
    """``log_prob``: behaviour log-probs are recomputed by the asynchronous trainer;
    ``baseline_log_prob``: by the synchronous one. Raises NoSplit."""
    tp = systems[0].tp
    found: dict[tuple[int, float], list[SimulatedPace]] = {}

    def paces(policy: int, bound: float) -> list[SimulatedPace]:
        if (policy, bound) not in found:
            rollout = (gpus - policy) // tp * tp
            found[policy, bound] = [
                asynchronous(system, policy, rollout, bound, log_prob=log_prob)
                for system in systems
            ]
        return found[policy, bound]

    def speed(policy: int, bound: float) -> float:
        """Geometric mean over the variants."""
        logs = [math.log(pace.samples_per_s) for pace in paces(policy, bound)]
        return math.exp(sum(logs) / len(logs))

    candidates = splits(gpus, policy_ranks, tp)
    policy = _peak(candidates, lambda p: speed(p, staleness[len(staleness) // 2]))
    fastest = max(speed(policy, bound) for bound in staleness)
    bound = next(b for b in staleness if speed(policy, b) >= AS_FAST * fastest)
    before = [
        synchronous(system, gpus, log_prob=baseline_log_prob, batches=SYNC_BATCHES)
        for system in systems
    ]
    variants = [Variant(a, s) for a, s in zip(paces(policy, bound), before, strict=True)]
    rollout = (gpus - policy) // tp * tp
    return SizePlan(gpus, policy, rollout, bound, tuple(variants))


def _peak(values: Sequence[int], of: Callable[[int], float]) -> int:
    """Where ``of``, which rises and then falls, is largest: the interval is divided by three until
    it is small."""
    low, high = 0, len(values) - 1
    while high - low > 2:
        third = (high - low) // 3
        left, right = low + third, high - third
        if of(values[left]) < of(values[right]):
            low = left + 1
        else:
            high = right
    return max(values[low : high + 1], key=of)
