"""Shares of time in which rollout workers are busy, idle or held back, averaged over the last steps.

The leader samples ten times a second from the newest reports and the ledger. The average forgets
exponentially: over ten seconds, or over the last two steps if these are longer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

AVERAGED_S = 10.0
AVERAGED_STEPS = 2.0


@dataclass(frozen=True, slots=True)
class FlowShares:
    """Of one moment, or averaged."""

    occupancy: float = 0.0
    """Slots of the engines that are in use. 0 to 1."""
    idle: float = 0.0
    """Engines that generate nothing. 0 to 1."""
    closed: float = 0.0
    """No task may be leased: as many groups are in flight as the staleness bound allows. 0 or 1."""
    lagging: float = 0.0
    """A task could be leased with the newest weights, and the engines do not have these. 0 to 1."""
    scoring: float = 0.0
    """Groups that are scored or wait for it, over those that can be scored at once. May exceed 1."""
    unsent: float = 0.0
    """Finished groups that the controller has not taken, over groups of a step. May exceed 1."""
    ready: float = 0.0
    """Enough groups for a step are ready. 0 or 1."""


@dataclass(slots=True)
class FlowAverage:
    mean: FlowShares = FlowShares()
    weight: float = 0.0
    """Of all samples so far; near 1 once the average has been filled."""

    def add(self, sample: FlowShares, elapsed_s: float, step_s: float) -> None:
        part = min(1.0, elapsed_s / max(AVERAGED_S, AVERAGED_STEPS * step_s))
        self.weight += part * (1.0 - self.weight)
        # As if it had begun with the first sample, not with zeros.
        share = part / self.weight if self.weight else 1.0
        self.mean = FlowShares(
            **{
                f.name: (before := getattr(self.mean, f.name))
                + share * (getattr(sample, f.name) - before)
                for f in fields(FlowShares)
            }
        )
