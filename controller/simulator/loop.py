"""Virtual time: an event heap, processes that can be killed or stopped, and coroutines in them.

A process is the unit of failure. Whatever is due for a killed process is dropped; for a stopped one
(SIGSTOP) it waits, and comes all at once when the process goes on.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Coroutine, Generator
from typing import Any


class Loop:
    """Time in seconds, from 0. Equal times run in the order in which they were asked for."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def after(self, delay: float, fn: Callable[..., None], *args: Any) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay, self._count, fn, args))

    def run(self, until: float, done: Callable[[], bool]) -> None:
        """Runs until nothing is left, ``done()`` holds, or the time ``until`` is reached."""
        heap = self._heap
        while heap and not done():
            if heap[0][0] > until:
                self.now = until
                return
            self.now, _, fn, args = heapq.heappop(heap)
            fn(*args)


class Future:
    """A value to come; awaited by coroutines of one process."""

    __slots__ = ("done", "value", "waiters")

    def __init__(self) -> None:
        self.done = False
        self.value: Any = None
        self.waiters: list[Callable[[], None]] = []

    def set(self, value: Any = None) -> None:
        if self.done:
            return
        self.done = True
        self.value = value
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            waiter()

    def __await__(self) -> Generator[Future, None, Any]:
        if not self.done:
            yield self
        return self.value


TIMEOUT: Any = object()
"""What ``Process.within`` gives when the time was up first."""


class Process:
    def __init__(self, loop: Loop, name: str) -> None:
        self.loop = loop
        self.name = name
        self.alive = True
        self.stopped = False
        self._queue: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._tasks: list[Coroutine[Any, Any, None]] = []

    # ---- faults ---------------------------------------------------------------------------

    def kill(self) -> None:
        """kill -9."""
        if not self.alive:
            return
        self.alive = False
        self._queue.clear()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            if task.cr_running:  # type: ignore[attr-defined]
                continue  # it is the one that ended its own process
            task.close()

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True

    def resume(self) -> None:
        """SIGCONT: everything that waited, in order."""
        self.stopped = False
        queue, self._queue = self._queue, []
        for fn, args in queue:
            self.loop.after(0.0, self.post, fn, *args)

    # ---- running --------------------------------------------------------------------------

    def post(self, fn: Callable[..., None], *args: Any) -> None:
        """Runs ``fn`` in this process: now, when it goes on again, or never."""
        if not self.alive:
            return
        if self.stopped:
            self._queue.append((fn, args))
        else:
            fn(*args)

    def after(self, delay: float, fn: Callable[..., None], *args: Any) -> None:
        self.loop.after(delay, self.post, fn, *args)

    def sleep(self, delay: float) -> Future:
        future = Future()
        self.after(delay, future.set)
        return future

    async def within(self, future: Future, delay: float) -> Any:
        """The future's value, or ``TIMEOUT`` after ``delay`` seconds."""
        either = Future()
        future.waiters.append(lambda: either.set(future.value))
        if future.done:
            return future.value
        self.after(delay, either.set, TIMEOUT)
        return await either

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(coroutine)
        self._step(coroutine)

    def _step(self, coroutine: Coroutine[Any, Any, None]) -> None:
        if not self.alive:
            return
        try:
            future = coroutine.send(None)
        except StopIteration:
            if coroutine in self._tasks:
                self._tasks.remove(coroutine)
            return
        future.waiters.append(lambda: self.after(0.0, self._step, coroutine))


class Network:
    """Messages between processes: delayed, sometimes lost or doubled, never across a partition."""

    def __init__(self, loop: Loop, *, loss: float, duplicate: float, delay: float) -> None:
        self.loop = loop
        self.rng = loop.rng
        self.loss = loss
        self.duplicate = duplicate
        self.delay = delay
        self._cuts: dict[tuple[str, str], int] = {}

    def cut(self, a: str, b: str) -> None:
        key = (a, b) if a < b else (b, a)
        self._cuts[key] = self._cuts.get(key, 0) + 1

    def mend(self, a: str, b: str) -> None:
        key = (a, b) if a < b else (b, a)
        self._cuts[key] -= 1
        if not self._cuts[key]:
            del self._cuts[key]

    def connected(self, a: str, b: str) -> bool:
        return not self._cuts or ((a, b) if a < b else (b, a)) not in self._cuts

    def send(self, source: str, target: Process, fn: Callable[..., None], *args: Any) -> None:
        """Runs ``fn`` in ``target`` a little later, unless the message is lost."""
        if self.rng.random() < self.loss:
            return
        self.loop.after(self._latency(), self._arrive, source, target, fn, args)
        if self.duplicate and self.rng.random() < self.duplicate:
            late = self._latency() + self.rng.random() * 3.0
            self.loop.after(late, self._arrive, source, target, fn, args)

    def _latency(self) -> float:
        return self.delay * (0.5 + self.rng.random())

    def _arrive(
        self, source: str, target: Process, fn: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        if self.connected(source, target.name):
            target.post(fn, *args)
