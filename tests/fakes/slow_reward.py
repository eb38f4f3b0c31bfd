"""A reward that waits, as one with a sandbox or a judge: steps last long enough to be interrupted."""

from __future__ import annotations

import asyncio

WAIT_S = 0.2


async def digit_first(completion: str) -> float:
    """1 if the completion begins with a digit."""
    await asyncio.sleep(WAIT_S)
    return float(completion[:1].isdigit())
