"""Lengths of completions: a log-normal clipped at the token limit, correlated within a group."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SIGMA = 1.1
"""Spread of log lengths if none is given. Published runs fit 0.6 (long reasoning) to 1.7 (many
short answers)."""
OF_THE_PROMPT = 0.3
"""Share of the variance of log lengths that the completions of one prompt have in common."""


@dataclass(frozen=True, slots=True)
class Lengths:
    median: float
    """Tokens of a completion that no limit cuts."""
    sigma: float
    cap: int
    """Token limit."""

    @classmethod
    def of_mean(cls, mean: float, cap: int, sigma: float = SIGMA) -> Lengths:
        """Those whose clipped mean is ``mean``. Raises ValueError unless 1 <= mean < cap."""
        if not 1 <= mean < cap:
            raise ValueError(
                f"a mean of {mean:g} tokens does not lie between 1 and the limit of {cap}"
            )
        low, high = 1e-3, float(cap) * 1e3
        for _ in range(80):
            middle = math.sqrt(low * high)
            if cls(middle, sigma, cap).mean < mean:
                low = middle
            else:
                high = middle
        return cls(high, sigma, cap)

    @property
    def mean(self) -> float:
        """Of the clipped lengths: exp(mu + s^2/2) F(z - s) + cap (1 - F(z)), z = (ln cap - mu) / s,
        F the normal distribution."""
        if self.sigma == 0:
            return min(self.median, float(self.cap))
        mu = math.log(self.median)
        z = (math.log(self.cap) - mu) / self.sigma
        whole = math.exp(mu + self.sigma**2 / 2)
        return whole * _normal(z - self.sigma) + self.cap * (1 - _normal(z))

    def draw(
        self, rng: np.random.Generator, groups: int, group_size: int
    ) -> npt.NDArray[np.float64]:
        """Tokens, at least one and at most ``cap``: (groups, group_size)."""
        prompt = rng.standard_normal((groups, 1))
        own = rng.standard_normal((groups, group_size))
        z = math.sqrt(OF_THE_PROMPT) * prompt + math.sqrt(1 - OF_THE_PROMPT) * own
        drawn = np.clip(np.round(np.exp(math.log(self.median) + self.sigma * z)), 1, self.cap)
        return np.asarray(drawn, dtype=np.float64)


def _normal(z: float) -> float:
    return 0.5 * (1 + math.erf(z / math.sqrt(2)))
