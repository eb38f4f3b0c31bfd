"""Reward functions for a rollout worker in the test's own process."""

import asyncio

gate = asyncio.Event()


async def gated(completion: str) -> float:
    """1, once the test has opened the gate."""
    await gate.wait()
    return 1.0


async def never(completion: str) -> float:
    """Waits without end."""
    await asyncio.Event().wait()
    return 1.0


def by_transcript(completion: str, transcript: list[dict[str, str]]) -> float:
    """How many entries it has."""
    return float(len(transcript))
