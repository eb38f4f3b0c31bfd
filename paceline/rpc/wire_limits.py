"""Bounds that both ends of the protocol keep to."""

from __future__ import annotations

MAX_REWARD = 1e9
"""Of a reward and of each of its components, in magnitude: far beyond any use, and sums of squares
stay finite in float32."""


def usable_reward(value: float) -> bool:
    """Finite and within MAX_REWARD. Of a NaN every comparison is false."""
    return abs(value) <= MAX_REWARD
