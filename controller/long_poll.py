"""Long polls inside the leader, by topic. A topic is woken once the events behind it are durable.
Waiters then ask the ledger again: a wake-up carries no news of its own, so one too many does no
harm, and one too few cannot happen, because a waiter names the turn of the topic that it has
already seen."""

import asyncio
import contextlib
from collections.abc import Iterable

from controller.ledger.events import Event, Topic


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
