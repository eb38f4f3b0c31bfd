"""Counter-based random numbers: (seed, completion, position) -> uniform, independent of the batch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_MASK = (1 << 64) - 1


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # The finaliser of SplitMix64 (Steele, Lea and Flood, 2014). Wraps around on purpose.
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))


def sample_keys(seed: int, indices: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A key for each completion of a request. uint64 [n]."""
    base = _mix(np.array([seed & _MASK], dtype=np.uint64) + _GOLDEN)
    return _mix(base ^ _mix((indices.astype(np.uint64) + np.uint64(1)) * _GOLDEN))


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float32]:
    """Uniform in (0, 1) for the token at each position of its completion. float32 [n]."""
    bits = _mix(keys + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    # 23 bits and a half: exact in float32, never 0 and never 1.
    return ((bits >> np.uint64(41)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
