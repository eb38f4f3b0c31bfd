"""Running mean and standard deviation of a quantity over the tokens of past steps, as numbers of
the state.

Moments of the step itself cannot whiten it: a group's summand would depend on the other groups, and
a replica sees only its share of them. So a step is whitened by the moments of the steps before it,
which all replicas hold, and its own sums enter the moments when it is committed. Parallel updates:
Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances", 1979.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

EPSILON = 1e-4
"""Smallest standard deviation, so that equal values do not explode."""


@dataclass(frozen=True, slots=True)
class RunningMoments:
    """Exponentially weighted: a step counts ``decay`` times as much with each step that follows it."""

    name: str
    decay: float

    @property
    def start(self) -> dict[str, float]:
        """The state's numbers before the first step."""
        return {f"{self.name}_{what}": 0.0 for what in ("weight", "mean", "squares")}

    @property
    def summed(self) -> tuple[str, ...]:
        """Names of the sums that a step adds."""
        return tuple(f"{self.name}_{what}" for what in ("count", "shifted", "shifted_square"))

    def sums(
        self, values: Tensor, trained: Tensor, scalars: Mapping[str, float]
    ) -> dict[str, Tensor]:
        """Of one row: values, trained (1 or 0) [C]. About the present mean, which keeps float32
        sums exact enough."""
        shifted = (values - scalars[f"{self.name}_mean"]) * trained
        sums = (trained.sum(), shifted.sum(), shifted.square().sum())
        return dict(zip(self.summed, sums, strict=True))

    def advance(self, scalars: Mapping[str, float], sums: Mapping[str, float]) -> dict[str, float]:
        """The state's numbers after a step whose sums over all replicas are ``sums``."""
        count, shifted, square = (sums[name] for name in self.summed)
        weight, mean, squares = (scalars[name] for name in self.start)
        if count == 0:
            return {name: scalars[name] for name in self.start}
        ago = self.decay * weight
        step = shifted / count  # mean of the step, minus ``mean``
        own = max(0.0, square - count * step * step)
        total = ago + count
        numbers = (
            total,
            mean + step * count / total,
            self.decay * squares + own + step * step * ago * count / total,
        )
        return dict(zip(self.start, numbers, strict=True))

    def of(self, scalars: Mapping[str, float]) -> tuple[float, float]:
        """Mean and standard deviation; 0 and 1 before the first step."""
        weight, mean, squares = (scalars[name] for name in self.start)
        return (mean, (squares / weight) ** 0.5) if weight else (0.0, 1.0)

    def whitened(
        self, values: Tensor, scalars: Mapping[str, float], *, shift_mean: bool = True
    ) -> Tensor:
        """(values - mean) / standard deviation, plus the mean again if not ``shift_mean``."""
        mean, deviation = self.of(scalars)
        white = (values - mean) / max(deviation, EPSILON)
        return white if shift_mean else white + mean
