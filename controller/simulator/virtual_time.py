"""Virtual time for asyncio: one timeline, and an event loop for each simulated process.

A process is the unit of failure. Whatever is due in a killed process is dropped; in a stopped one
(SIGSTOP) it waits, and comes all at once when the process goes on. Callbacks that are due at the same
time run in the order in which they were asked for, so a seed gives the same run every time.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import random
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any, cast

EPOCH_S = 1.7e9
"""Unix time at which every simulated run begins."""


class VirtualHandle:
    """A callback to run at ``due``; in a process, if it has one."""

    __slots__ = ("args", "callback", "context", "due", "process")

    def __init__(
        self,
        due: float,
        process: Process | None,
        callback: Callable[..., Any] | None,
        args: tuple[Any, ...],
        context: Context | None,
    ) -> None:
        self.due = due
        self.process = process
        self.callback = callback
        self.args = args
        self.context = context

    def when(self) -> float:
        return self.due

    def cancelled(self) -> bool:
        return self.callback is None

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
        self._ready: deque[VirtualHandle] = deque()
        self._count = 0

    def after(self, delay: float, callback: Callable[..., Any], *args: Any) -> None:
        """Runs ``callback`` outside all processes: a fault, or a message on its way."""
        self.add(delay, VirtualHandle(self.now + delay, None, callback, args, None))

    def add(self, delay: float, handle: VirtualHandle) -> None:
        if delay <= 0.0:
            self._ready.append(handle)
        else:
            self._count += 1
            heapq.heappush(self._heap, (handle.due, self._count, handle))

    def run(self, until: float, done: Callable[[], bool]) -> None:
        """Runs until nothing is left, ``done()`` holds, or the time ``until`` is reached."""
        heap, ready = self._heap, self._ready
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
                    handle.context.run(callback, *handle.args)  # type: ignore[union-attr]
        finally:
            events._set_running_loop(None)

    def close(self) -> None:
        """Ends every coroutine that is still there."""
        for process in self.processes:
            process.alive = False
        for process in self.processes:
            for task in process.tasks:
                _end(task)
            process.tasks.clear()
        self.processes.clear()
        self._heap.clear()
        self._ready.clear()


def _end(task: asyncio.Task[Any]) -> None:
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    coroutine = task.get_coro()
    for _ in range(3):
        # What it awaits while it is being closed is not there any more.
        with contextlib.suppress(BaseException):
            coroutine.close()  # type: ignore[union-attr]
            return


class Process:
    """One simulated process: an event loop on the common timeline, and the process's clock."""

    def __init__(self, timeline: Timeline, name: str, *, skew_s: float = 0.0) -> None:
        self.timeline = timeline
        self.name = name
        self.alive = True
        self.stopped = False
        self.waiting: list[VirtualHandle] = []
        """What came due while the process was stopped."""
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
        for handle in waiting:
            self.timeline.add(0.0, handle)

    # ---- clock ----------------------------------------------------------------------------

    def time(self) -> float:
        """As asyncio asks for it."""
        return self.timeline.now

    def monotonic(self) -> float:
        return self.timeline.now

    def unix_time(self) -> float:
        return EPOCH_S + self.timeline.now + self._skew_s

    # ---- what asyncio asks of a loop ------------------------------------------------------

    def call_soon(
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> VirtualHandle:
        return self.call_later(0.0, callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> VirtualHandle:
        due = self.timeline.now + delay
        handle = VirtualHandle(due, self, callback, args, context or copy_context())
        self.timeline.add(delay, handle)
        return handle

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> VirtualHandle:
        return self.call_later(when - self.timeline.now, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=cast(asyncio.AbstractEventLoop, self))

    def create_task(
        self, coroutine: Coroutine[Any, Any, Any], *, name: str | None = None, context: Any = None
    ) -> asyncio.Task[Any]:
        loop = cast(asyncio.AbstractEventLoop, self)
        task = asyncio.Task(coroutine, loop=loop, name=name, context=context)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def run_in_executor(
        self, executor: Any, function: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
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
"""What ``Process.answer`` and ``within`` give if the time is up first."""


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
        self.monotonic = process.monotonic
        self.time = process.unix_time


class Network:
    """Messages between processes: delayed, sometimes lost or doubled, never across a partition."""

    def __init__(self, timeline: Timeline, *, loss: float, duplicate: float, delay: float) -> None:
        self.timeline = timeline
        self.rng = timeline.rng
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

    def send(self, source: str, target: Process, fn: Callable[..., Any], *args: Any) -> None:
        """Runs ``fn`` in ``target`` a little later, unless the message is lost."""
        if self.rng.random() < self.loss:
            return
        self._deliver(self._latency(), source, target, fn, args)
        if self.duplicate and self.rng.random() < self.duplicate:
            late = self._latency() + self.rng.random() * 3.0
            self._deliver(late, source, target, fn, args)

    def _latency(self) -> float:
        return self.delay * (0.5 + self.rng.random())

    def _deliver(
        self,
        delay: float,
        source: str,
        target: Process,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
    ) -> None:
        def arrive() -> None:
            if self.connected(source, target.name):
                fn(*args)

        due = self.timeline.now + delay
        self.timeline.add(delay, VirtualHandle(due, target, arrive, (), _EMPTY))


_EMPTY = Context()
