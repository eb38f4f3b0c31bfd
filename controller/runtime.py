"""Runtime of a controller: clock, cancellation, and long polls by topic.

A topic is woken once the events behind it are durable. Waiters then ask the ledger again: a wake-up
carries no news of its own, so one too many does no harm, and one too few cannot happen, because a
waiter names the turn of the topic that it has already seen."""

import asyncio
import contextlib
import time
from collections.abc import Iterable
from typing import Any, Protocol

from controller.ledger.events import Event, Topic


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


class WakeUps:
    def __init__(self) -> None:
        self.turn = 0  # Rises with every wake-up
        self._next = asyncio.Event()

    def wake(self) -> None:
        self.turn += 1
        woken, self._next = self._next, asyncio.Event()
        woken.set()

    async def wait(self, seen: int, timeout_s: float) -> None:
        """Waits until ``turn`` is past ``seen``, for at most ``timeout_s`` seconds."""
        if self.turn == seen:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._next.wait()


class LongPolls:
    """The topics of one leader. Each event class says which of them it wakes."""

    def __init__(self) -> None:
        self._topics = {name: WakeUps() for name in Topic}
        self.journal = WakeUps()  # Something was appended: for followers of the events

    def __getitem__(self, topic: Topic) -> WakeUps:
        return self._topics[topic]

    def announce(self, events: Iterable[Event]) -> None:
        """Wakes the topics that these durable events concern."""
        woken = frozenset[Topic]().union(*(event.wakes for event in events))
        # In the order of the topics: that of a set of strings differs from process to process.
        for topic in Topic:
            if topic in woken:
                self._topics[topic].wake()
        self.journal.wake()

    def wake_all(self) -> None:
        """The leader steps down: all waits end."""
        for wake_ups in [*self._topics.values(), self.journal]:
            wake_ups.wake()
