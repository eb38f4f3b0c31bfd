"""Reward functions that wait, as a sandbox or a judge does, so that steps last long enough."""

from __future__ import annotations

import asyncio

WAIT_S = 0.2
LONG_WAIT_S = 1.0


async def digit_first(completion: str) -> float:
    """1 if the completion begins with a digit."""
    await asyncio.sleep(WAIT_S)
    return float(completion[:1].isdigit())


async def digit_first_later(completion: str) -> float:
    """The same, for a fleet that a test waits beside: its steps leave the cores to others."""
    await asyncio.sleep(LONG_WAIT_S)
    return float(completion[:1].isdigit())
