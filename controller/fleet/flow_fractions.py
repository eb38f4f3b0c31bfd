"""Shares of time in which workers are busy, idle or held back, averaged over the last
steps. The leader samples ten times a second from the newest reports and the ledger. The average
forgets exponentially: over ten seconds, or over the last two steps if these are longer."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

AVERAGED_S = 10.0
AVERAGED_STEPS = 2.0


@dataclass(frozen=True, slots=True)
class FlowFractions:
    occupancy: float = 0.0  # Slots of the engines that are in use. 0 to 1.
    idle: float = 0.0  # Engines that generate nothing. 0 to 1.
    closed: float = 0.0
    """No task may be leased: as many groups are in flight as the staleness bound allows. 0 or 1."""
    lagging: float = 0.0
    """A task could be leased with the newest weights, and the engines do not have these. 0 to 1."""
    scoring: float = 0.0
    """Groups scored or waiting for it, over those that can be scored at once. May exceed 1."""
    scorers: float = 0.0
    """Workers of the busiest scorer that have as many requests as they can work on. 0 to 1."""
    unsent: float = 0.0
    """Finished groups that the controller has not taken, over groups of a step. May exceed 1."""
    ready: float = 0.0  # Enough groups for a step are ready. 0 or 1.
    generating: float = 0.0  # Engines that generate something. 0 to 1; 0 if there is none.
    generated: float = 0.0  # Tokens per second of an engine
    devices: float = 0.0  # GPUs that compute something. 0 to 1; 0 if no worker reports it.


def mean_of(values: Iterable[float]) -> float:
    """Mean of the finite ones; 0 without any."""
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else 0.0


@dataclass(slots=True)
class FlowAverage:
    mean: FlowFractions = FlowFractions()
    _steps: float = 0.0  # Commits so far, forgotten as the shares are
    _sums: dict[str, float] = field(default_factory=dict)
    weight: float = 0.0  # Weight of all samples so far; near 1 once the average has been filled

    def commit(self, metrics: Mapping[str, float]) -> None:
        """A step was committed. Groups come in waves: of two steps in a row one may wait and one
        not."""
        step_s = metrics.get("step_s", 0.0)
        kept = math.exp(-step_s / max(AVERAGED_S, AVERAGED_STEPS * self.of_a_step("step_s")))
        self._steps = kept * self._steps + 1.0
        names = self._sums.keys() | {n for n in metrics if n.startswith("time_")} | {"step_s"}
        self._sums = {n: kept * self._sums.get(n, 0.0) + metrics.get(n, 0.0) for n in names}

    def of_a_step(self, name: str) -> float:
        """Mean of step_s or of a time_*_s of the last steps; 0: not measured."""
        return self._sums.get(name, 0.0) / self._steps if self._steps else 0.0

    def add(self, sample: FlowFractions, elapsed_s: float, step_s: float) -> None:
        part = min(1.0, elapsed_s / max(AVERAGED_S, AVERAGED_STEPS * step_s))
        self.weight += part * (1.0 - self.weight)
        # As if it had begun with the first sample, not with zeros.
        share = part / self.weight if self.weight else 1.0
        self.mean = FlowFractions(
            **{
                f.name: (before := getattr(self.mean, f.name))
                + share * (getattr(sample, f.name) - before)
                for f in fields(FlowFractions)
            }
        )
