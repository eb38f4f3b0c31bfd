import asyncio
import time
from collections.abc import Iterable
from typing import Any, Protocol


class NotLeading(Exception):
    """This controller does not lead now. ``leader`` is the address of the one that does, if
    known."""

    def __init__(self, message: str, leader: str = "") -> None:
        super().__init__(message)
        self.leader = leader


class Clock(Protocol):
    """The two readings of the ``time`` module that the controller uses; seconds."""

    def time(self) -> float:
        """Unix time. It may jump."""
        ...

    def monotonic(self) -> float:
        """Time for measuring intervals. It never falls."""
        ...


SYSTEM_CLOCK: Clock = time


async def cancel_all(tasks: Iterable[asyncio.Task[Any]], *, again_s: float = 0.2) -> None:
    """Cancels ``tasks`` every ``again_s`` seconds until every one has ended. Once is not enough: a
    cancellation that meets a Redis time limit as it runs out comes back as a time-out, which a loop
    that survives outages takes for one."""
    tasks = list(tasks)
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=again_s)
