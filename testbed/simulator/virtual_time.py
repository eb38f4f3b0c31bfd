"""Virtual-time event loop.

One for each simulated process, and the network between them.

A process is the unit of failure. Whatever is due in a killed process is dropped; in a stopped one
(SIGSTOP) it waits, and comes all at once when the process goes on. Callbacks that are due at the
same time run in the order in which they were asked for, so a seed gives the same run every time.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import random
from asyncio import events
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

EPOCH_S = 1.7e9
"""Unix time at which every simulated run begins."""


@dataclass(slots=True, eq=False)
class VirtualHandle:
    """A callback to run at ``due``; in a process, if it has one.

    Contexts are left out: nothing that runs in virtual time uses context variables.
    """

    due: float
    process: Process | None
    callback: Callable[..., Any] | None
    args: Any

    def cancel(self) -> None:
        self.callback = None
        self.args = ()


class Timeline:
    """Time in seconds, from 0."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 0.0
        self.processes: list[Process] = []
        self._heap: list[tuple[float, int, VirtualHandle]] = []
        self.ready: deque[VirtualHandle] = deque()
        self._count = 0

    def after(self, delay: float, callback: Callable[..., Any], *args: Any) -> None:
        """Runs ``callback`` outside all processes: a fault, or a message on its way."""
        self.add(delay, None, callback, args)

    def add(
        self, delay: float, process: Process | None, callback: Callable[..., Any], args: Any
    ) -> VirtualHandle:
        handle = VirtualHandle(self.now + delay, process, callback, args)
        if delay <= 0.0:
            self.ready.append(handle)
        else:
            self._count += 1
            heapq.heappush(self._heap, (handle.due, self._count, handle))
        return handle

    def run(self, until: float, done: Callable[[], bool]) -> None:
        """Runs until nothing is left, ``done()`` holds, or the time ``until`` is reached."""
        heap, ready = self._heap, self.ready
        current: Process | None = None
        try:
            while True:
                if ready:
                    handle = ready.popleft()
                elif not heap or done():
                    return
                elif heap[0][0] > until:
                    self.now = until
                    return
                else:
                    self.now, _, handle = heapq.heappop(heap)
                callback, process = handle.callback, handle.process
                if callback is None:
                    continue
                if process is None:
                    callback(*handle.args)
                elif process.stopped:
                    process.waiting.append(handle)
                elif process.alive:
                    if process is not current:
                        events._set_running_loop(process)  # type: ignore[arg-type]
                        current = process
                    callback(*handle.args)
        finally:
            events._set_running_loop(None)

    def close(self) -> None:
        """Ends every coroutine that is still there."""
        for process in self.processes:
            process.alive = False
        for process in self.processes:
            for task in process.tasks:
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                # What it awaits while it is being closed is not there any more.
                with contextlib.suppress(BaseException):
                    task.get_coro().close()  # type: ignore[union-attr]
            process.tasks.clear()
        self.processes.clear()
        self._heap.clear()
        self.ready.clear()


class Process:
    """One simulated process: an event loop on the common timeline, and the process's clock."""

    def __init__(self, timeline: Timeline, name: str, *, skew_s: float = 0.0) -> None:
        self.timeline = timeline
        self.name = name
        self.alive = True
        self.stopped = False
        self.waiting: list[VirtualHandle] = []
        """Calls that came due while the process was stopped."""
        self.tasks: set[asyncio.Task[Any]] = set()
        self._skew_s = skew_s
        timeline.processes.append(self)

    # ---- faults ---------------------------------------------------------------------------

    def kill(self) -> None:
        """kill -9. Its coroutines stay where they are until the run is over."""
        self.alive = self.stopped = False
        self.waiting.clear()

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True

    def resume(self) -> None:
        """SIGCONT: everything that waited, in order."""
        self.stopped = False
        waiting, self.waiting = self.waiting, []
        self.timeline.ready.extend(waiting)

    def set_clock(self, by_s: float) -> None:
        """date -s: the wall clock jumps, the monotonic one does not."""
        self._skew_s += by_s

    # ---- clock ----------------------------------------------------------------------------

    def time(self) -> float:
        """The monotonic clock, as asyncio asks for it."""
        return self.timeline.now

    def unix_time(self) -> float:
        return EPOCH_S + self.timeline.now + self._skew_s

    # ---- what asyncio asks of a loop ------------------------------------------------------

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        return self.timeline.add(0.0, self, callback, args)

    def call_later(self, delay: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return self.timeline.add(delay, self, callback, args)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        return self.timeline.add(when - self.timeline.now, self, callback, args)

    def create_future(self) -> asyncio.Future[Any]:
        loop: Any = self
        return asyncio.Future(loop=loop)

    def create_task(self, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        loop: Any = self
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **options)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def run_in_executor(self, executor: Any, function: Any, *args: Any) -> asyncio.Future[Any]:
        """At once: threads would not be repeatable."""
        future = self.create_future()
        future.set_result(function(*args))
        return future

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Faults of tasks are looked at where the tasks are started."""

    # ---- what the models use --------------------------------------------------------------

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Starts a task of a model, whose failure fails the run."""
        task = self.create_task(coroutine)
        task.add_done_callback(_raise)
        return task

    async def answer(self, future: asyncio.Future[Any], delay: float) -> Any:
        """The future's value; after ``delay`` seconds that is ``TIMEOUT``, for good."""
        timer = self.call_later(delay, settle, future, TIMEOUT)
        value = await future
        timer.cancel()
        return value

    async def within(self, future: asyncio.Future[Any], delay: float) -> Any:
        """The future's value, or ``TIMEOUT`` after ``delay`` seconds; the future stays as it is."""
        if future.done():
            return future.result()
        either = self.create_future()
        timer = self.call_later(delay, settle, either, TIMEOUT)
        future.add_done_callback(lambda done: settle(either, done.result()))
        value = await either
        timer.cancel()
        return value


TIMEOUT: Any = object()
"""Result that ``Process.answer`` and ``within`` give if the time is up first."""


def settle(future: asyncio.Future[Any], value: Any = None) -> None:
    """Gives ``future`` its value, unless it has one."""
    if not future.done():
        future.set_result(value)


def _raise(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.result()


class ProcessClock:
    """The process's clock as the controller is handed it."""

    def __init__(self, process: Process) -> None:
        self.monotonic = process.time
        self.time = process.unix_time


class Network:
    """Messages between processes: delayed, sometimes lost or doubled, never across a partition."""

    def __init__(
        self, timeline: Timeline, *, loss: float, duplicate: float, delay: float, torn: float
    ) -> None:
        self.timeline = timeline
        self.rng = timeline.rng
        self.loss = loss
        self.duplicate = duplicate
        self.delay = delay
        self.torn = torn
        """Probability that one member's collective fails where the others' succeed."""
        self._cuts: Counter[frozenset[str]] = Counter()

    def cut(self, a: str, b: str) -> None:
        self._cuts[frozenset((a, b))] += 1

    def mend(self, a: str, b: str) -> None:
        self._cuts[frozenset((a, b))] -= 1

    def connected(self, a: str, b: str) -> bool:
        return not self._cuts[frozenset((a, b))]

    def send(self, source: str, target: Process, fn: Callable[..., Any], *args: Any) -> None:
        """Runs ``fn`` in ``target`` a little later, unless the message is lost."""
        if self.rng.random() < self.loss:
            return
        target.call_later(self._latency(), self._arrive, source, target, fn, args)
        if self.duplicate and self.rng.random() < self.duplicate:
            late = self._latency() + self.rng.random() * 3.0
            target.call_later(late, self._arrive, source, target, fn, args)

    def _latency(self) -> float:
        return self.delay * (0.5 + self.rng.random())

    def _arrive(self, source: str, target: Process, fn: Callable[..., Any], args: Any) -> None:
        if self.connected(source, target.name):
            fn(*args)
