"""A reward that waits before it answers, as a sandbox or a judge does: log-normal, heavy-tailed.

The wait is drawn from the prompt and the completion, so that every mode of a benchmark meets the
same distribution; the value is the exact match, so that it does not depend on the wait.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import statistics
from typing import Any

MEDIAN_S = float(os.environ.get("PACELINE_WAIT_MEDIAN_S", "0.1"))
SIGMA = float(os.environ.get("PACELINE_WAIT_SIGMA", "1.0"))
_NORMAL = statistics.NormalDist()


def wait_s(prompt: str, completion: str) -> float:
    """Seconds: log-normal with median MEDIAN_S and shape SIGMA."""
    digest = hashlib.blake2b(f"{prompt}{completion}".encode(), digest_size=8).digest()
    uniform = (int.from_bytes(digest, "big") + 0.5) / 2**64
    return MEDIAN_S * math.exp(SIGMA * _NORMAL.inv_cdf(uniform))


async def judge(prompt: str, completion: str, answer: Any) -> float:
    """1 for exactly the answer, else 0, after waiting."""
    await asyncio.sleep(wait_s(prompt, completion))
    return float(completion == answer)
