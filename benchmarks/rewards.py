"""Rewards of benchmarks: one that costs nothing, and two that wait before they answer."""

import asyncio
import hashlib
import math
import statistics
from typing import Any

from examples.digit_sort.reward import sorted_exactly

TOKEN_S = 0.1
"""Wait of ``by_length`` for each token, in seconds."""
MEDIAN_S, SIGMA = 0.1, 1.0
"""Log-normal wait of ``by_chance``: median in seconds, and shape."""


def first_digit(completion: str) -> float:
    """0 to 1; 0 if the completion does not begin with a digit."""
    return int(completion[0]) / 9 if completion[:1].isdigit() else 0.0


async def by_length(completion: str, answer: str, finish_reason: str, token_count: int) -> float:
    """Exact match after a wait in proportion to the answer's length, as in a generation."""
    await asyncio.sleep(TOKEN_S * token_count)
    return sorted_exactly(completion, answer, finish_reason, token_count)


async def by_chance(prompt: str, completion: str, answer: Any) -> float:
    """Exact match after a log-normal wait, heavy-tailed as that of a sandbox or a judge.

    The wait follows from prompt and completion, so that every mode meets the same distribution.
    """
    digest = hashlib.blake2b(f"{prompt}{completion}".encode(), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "big") + 0.5) / 2**64
    await asyncio.sleep(MEDIAN_S * math.exp(SIGMA * statistics.NormalDist().inv_cdf(uniform)))
    return float(completion == answer)
