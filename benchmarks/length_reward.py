"""A reward that waits in proportion to the answer's length, as a longer generation or execution
does.

Digit sort with it is a task whose harder prompts need longer answers, and longer answers more time.
"""

from __future__ import annotations

import asyncio
import os

from examples.digit_sort.reward import sorted_exactly

TOKEN_S = float(os.environ.get("PACELINE_WAIT_TOKEN_S", "0.1"))
"""Seconds a token."""


async def judge(completion: str, answer: str, finish_reason: str, token_count: int) -> float:
    """1 for exactly the answer and its end, else 0, after token_count * TOKEN_S seconds."""
    await asyncio.sleep(TOKEN_S * token_count)
    return sorted_exactly(completion, answer, finish_reason, token_count)
