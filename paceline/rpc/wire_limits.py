"""Limits of values on the wire, for senders and receivers."""

from __future__ import annotations

MAX_REWARD = 1e9
"""Largest magnitude of a reward and its components: sums of squares stay finite in float32."""


def usable_reward(value: float) -> bool:
    """True if ``value`` is finite and within MAX_REWARD (comparisons of a NaN are false)."""
    return abs(value) <= MAX_REWARD
