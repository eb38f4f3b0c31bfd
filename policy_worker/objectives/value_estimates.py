"""Value estimates of PPO: advantages from a critic (GAE), running moments that whiten them, and the
adaptive coefficient of the KL penalty.

Sources: GAE, Schulman et al., arXiv 1506.02438, equation 16. Running moments: Chan, Golub and
LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979. KL
controller: Ziegler et al., arXiv 1909.08593, section 2.2.

Moments of the step itself cannot whiten it: a group's summand would depend on the other groups, and
a replica sees only its share of them. So a step is whitened by the moments of the steps before it,
which all replicas hold, and its own sums enter the moments when it is committed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


def gae(
    rewards: Tensor,
    values: Tensor,
    trained: Tensor,
    sequence_of: Tensor,
    *,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (value targets), [C] each, in the dtype of ``values``; 0 where nothing
    is trained.

    rewards, values, trained (1 or 0): [C], tokens of each sequence side by side and in order;
    sequence_of: int64 [C], not falling. ``values`` are V(s_t), of the state in which token t is
    chosen. With t + 1 the next *trained* token of the sequence, and V = 0 after the last one:

        delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1},   R_t = A_t + V_t

    Tokens that are not trained (an environment's, or too old ones) are no actions: they are
    skipped, without a discount, and so the value carries over to the next action. Their rewards are
    not counted.
    """
    places = trained.nonzero()[:, 0]
    sequence = sequence_of[places]
    goes_on = torch.zeros(len(places), dtype=values.dtype, device=values.device)
    if len(places):
        goes_on[:-1] = (sequence[1:] == sequence[:-1]).to(values.dtype)
    value = values[places]
    following = goes_on * torch.cat([value[1:], value.new_zeros(1)])[: len(places)]
    advantage = rewards[places].to(values.dtype) + gamma * following - value
    # A_t = delta_t + c_t A_{t+1}, for all t at once: after n doublings A_t holds the terms of 2^n
    # tokens, and c_t is their discount, 0 beyond the end of the sequence. 15 passes for 32,768
    # tokens, in place of as many steps.
    discount = gamma * lam * goes_on
    reach = 1
    while reach < len(places) and bool(discount.any()):
        advantage = advantage + discount * _shifted(advantage, reach)
        discount = discount * _shifted(discount, reach)
        reach *= 2
    zeros = torch.zeros_like(values)
    made = advantage, advantage + value
    return zeros.index_copy(0, places, made[0]), zeros.index_copy(0, places, made[1])


def _shifted(column: Tensor, by: int) -> Tensor:
    """Element t + ``by`` at t; 0 beyond the end."""
    return torch.cat([column[by:], column.new_zeros(by)])


EPSILON = 1e-4
"""Smallest standard deviation, so that equal values do not explode."""


@dataclass(frozen=True, slots=True)
class RunningMoments:
    """Exponentially weighted: a step counts ``decay`` times as much with each step that follows
    it."""

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
        """Sums of one row: values, trained (1 or 0) [C]. About the present mean, which keeps
        float32 sums exact enough."""
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


ERROR_LIMIT = 0.2
"""Relative errors are clipped to it, so that one step cannot throw the coefficient about."""


def adapted(
    coefficient: float, kl: float, completions: float, *, target: float, horizon: float
) -> float:
    """The coefficient after a step of ``completions`` with the mean ``kl``, in nats per completion.
    error = clip(kl / target - 1, -0.2, 0.2); coefficient * (1 + error * completions / horizon). The
    paper's gain of 0.1 is that of its batches: 1,024 completions of a horizon of 10,000. In one
    step the coefficient falls to a tenth at most: from 0 it could never rise again."""
    error = min(max(kl / target - 1.0, -ERROR_LIMIT), ERROR_LIMIT)
    return coefficient * max(0.1, 1.0 + error * completions / horizon)
