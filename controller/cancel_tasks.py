"""Cancellation of asyncio tasks, repeated until they have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any


async def cancel_all(tasks: Iterable[asyncio.Task[Any]], *, again_s: float = 0.2) -> None:
    """Cancels ``tasks`` every ``again_s`` seconds until every one has ended.

    Once is not enough: a cancellation that meets a Redis time limit as it runs out comes back as a
    time-out, which a loop that survives outages takes for one.
    """
    tasks = list(tasks)
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=again_s)
