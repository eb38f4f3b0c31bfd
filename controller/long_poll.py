"""Long polls of the leader: requests that wait for something to happen, by topic.

A topic is woken once what it stands for is durable. Waiters then ask the ledger again: a wake-up
carries no news of its own, so one too many does no harm, and one too few cannot happen, because a
waiter names the state of the topic it has already seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any


class Topic:
    """Wakes all waiters at once."""

    def __init__(self) -> None:
        self.turn = 0
        """Rises with every wake-up."""
        self._waiters: dict[asyncio.Future[None], None] = {}
        """In the order in which they came."""

    def wake(self) -> None:
        self.turn += 1
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, seen: int, timeout_s: float) -> bool:
        """Waits until ``turn`` is past ``seen``; False after ``timeout_s`` seconds."""
        if self.turn != seen:
            return True
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            async with asyncio.timeout(timeout_s):
                await waiter
            return True
        except TimeoutError:
            return False
        finally:
            self._waiters.pop(waiter, None)


_ENDINGS = ("StopRequested", "RunFinished", "RunFailed")

# What can make a task admissible, or end the waiting for one.
_LEASE = frozenset(
    {
        "RunStarted",
        "StepCommitted",
        "StepAborted",
        "TaskReleased",
        "TaskDropped",
        "WorkerChanged",
        "WorkerDied",
        "SpareSet",
        "RolledBack",
        "EvalScheduled",
        "Paused",
        "Drained",
        *_ENDINGS,
    }
)

WAKES: Mapping[str, frozenset[str]] = {
    "lease": _LEASE,
    # For the one worker that runs empty; too frequent to wake everybody.
    "alone": _LEASE | {"GroupAccepted", "EvalTaskDone", "LeaseSuperseded"},
    "plan": frozenset({"StepOpened", "StepResharded", "MeshBroken", "MeshFormed", *_ENDINGS}),
    "vote": frozenset({"StepCommitted", "StepAborted", "StepResharded", "MeshBroken", *_ENDINGS}),
}
"""Topic to the types of events that wake it."""

SILENT = frozenset(
    {
        "TasksLeased",
        "GroupAccepted",
        "VoteCast",
        "StepOpened",
        "StepResharded",
        "EvalTaskDone",
        "WorkerChanged",
    }
)
"""Types of events that no directive depends on; a worker's change concerns its own alone, and that
is looked at with every report."""


class LongPolls:
    """The topics of one leader."""

    def __init__(self) -> None:
        self.topics = {name: Topic() for name in WAKES}
        self.journal = Topic()
        """Something was appended: for those who follow the events."""

    @property
    def lease(self) -> Topic:
        return self.topics["lease"]

    @property
    def alone(self) -> Topic:
        return self.topics["alone"]

    @property
    def plan(self) -> Topic:
        return self.topics["plan"]

    @property
    def vote(self) -> Topic:
        return self.topics["vote"]

    def announce(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Wakes the topics that these durable events concern."""
        kinds = {event["type"] for event in events}
        for name, topic in self.topics.items():
            if kinds & WAKES[name]:
                topic.wake()
        self.journal.wake()

    def wake_all(self) -> None:
        """The leader steps down: nobody waits on it any longer."""
        for topic in self.topics.values():
            topic.wake()
        self.journal.wake()
