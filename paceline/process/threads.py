"""Threads and event loops beside the main one, which end before the interpreter shuts down.

If a thread returns from C++ into an interpreter that is shutting down, the process aborts with exit
status 134 instead of 0. Threads that run torch are therefore started with ``start`` and stop when
asked. A call that may never return (a file on a dead mount) has a daemon thread of its own: the
event loop's thread pool is joined at exit.
"""

import asyncio
import atexit
import concurrent.futures
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_AT_MOST_S = 5.0
_POLL_S = 0.25

exiting = threading.Event()  # set when the interpreter starts to shut down

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_hooks: list[weakref.WeakMethod[Callable[[], None]]] = []


def start(target: Callable[..., object], name: str, args: Iterable[Any] = ()) -> threading.Thread:
    """Starts a daemon thread. The interpreter's exit waits for it, up to a limit."""
    thread = threading.Thread(target=target, name=name, args=tuple(args), daemon=True)
    _threads.add(thread)
    thread.start()
    return thread


def on_exit(method: Callable[[], None]) -> None:
    """Registers a bound method that makes threads stop. It is called at interpreter exit, before
    the threads are waited for, if its object is still alive."""
    _hooks[:] = [hook for hook in _hooks if hook() is not None]
    _hooks.append(weakref.WeakMethod(method))


def join(threads: Iterable[threading.Thread], timeout_s: float) -> bool:
    """Waits for all but the calling thread. Returns whether they have ended."""
    deadline = time.monotonic() + timeout_s
    others = [t for t in threads if t is not threading.current_thread()]
    for thread in others:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in others)


@atexit.register
def _exit() -> None:
    exiting.set()
    for hook in _hooks:
        stop = hook()
        if stop is not None:
            stop()
    join(list(_threads), _AT_MOST_S)


_loops_of_users: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()


def end_forks_of(loop: asyncio.AbstractEventLoop) -> None:
    """Call it for a loop that runs code of users. A fork of this process (``os.fork`` in that code)
    that returns to the loop ends there: it would do this process's work a second time, over the
    same descriptors. A fork that ends by itself, as those of multiprocessing do, is left alone."""
    _loops_of_users.add(loop)


def _end_forks() -> None:
    for loop in _loops_of_users:
        if not loop.is_closed():
            # It is the next thing that the loop does, before any input is read.
            loop.call_soon(os._exit, 1)


os.register_at_fork(after_in_child=_end_forks)


def replace_executor(loop: asyncio.AbstractEventLoop) -> None:
    """Gives ``loop`` a new default executor. Calls of users that never return would fill the old
    one, and whatever else needs a thread would wait for them."""
    loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(thread_name_prefix="asyncio"))


class BackgroundLoop:
    """Runs coroutines for other threads. Call it from any thread but its own."""

    def __init__(self, name: str = "control-plane") -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, coro: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Starts ``coro`` on the loop. Cancelling the future cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(coro, self.loop)

    def run(self, coro: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Blocks until the result is there. Raises TimeoutError after ``timeout_s`` seconds."""
        if threading.current_thread() is self._thread:
            coro.close()
            raise RuntimeError("BackgroundLoop.run on its own thread would wait for itself")
        future = self.submit(coro)
        try:
            return future.result(timeout_s)
        except (concurrent.futures.TimeoutError, KeyboardInterrupt):
            future.cancel()
            raise

    def close(self, timeout_s: float = 5.0) -> None:
        """Cancels running coroutines and ends the thread. Idempotent."""
        if not self._thread.is_alive():
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout_s)

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()


async def all_or_none(work: Iterable[Awaitable[T]]) -> list[T]:
    """The results, in order. If one fails, or the caller is cancelled, the others are cancelled and
    have ended before this raises."""
    futures = [asyncio.ensure_future(each) for each in work]
    try:
        return list(await asyncio.gather(*futures))
    except BaseException:
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)
        raise


async def in_daemon_thread(work: Callable[[], T], name: str) -> T:
    """The result of ``work``. If the caller is cancelled, the thread goes on and nobody waits for
    it."""
    return await asyncio.get_running_loop().run_in_executor(_DaemonThread(name), work)


class _DaemonThread(Executor):
    """A thread for each call. Through the loop's own method, which virtual time replaces."""

    def __init__(self, name: str) -> None:
        self._name = name

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=run, name=self._name, daemon=True).start()
        return future


class Drain(ABC, Generic[T]):
    """Thread that takes what others put, a few times a second, and holds up nobody. It polls: woken
    for every item, it would compete with the event loop for the interpreter."""

    def __init__(self, name: str, *, poll_s: float = _POLL_S) -> None:
        self._items: deque[T] = deque()
        self._poll_s = poll_s
        self._closing = threading.Event()
        self._outcome: str | None = None
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        if not self._closing.is_set():
            self._thread.start()

    def put(self, item: T) -> None:
        self._items.append(item)

    def begin_close(self, outcome: str | None = None) -> None:
        """Asks the thread to take what is there and to end. Later calls change nothing.
        ``outcome``: finished or failed; None if the run goes on with another leader."""
        if not self._closing.is_set():
            self._outcome = outcome
            self._closing.set()

    def join(self, timeout_s: float) -> bool:
        """True if the thread has ended, or never began."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @abstractmethod
    def _serve(self) -> None:
        """Body of the thread."""

    def _batches(self) -> Iterator[list[T]]:
        """Items since the last batch, every ``poll_s``; the last batch after the call to close."""
        closing = False
        while not closing:
            # Read before the items: those that came before the call to close are taken.
            closing = self._closing.wait(self._poll_s)
            yield [self._items.popleft() for _ in range(len(self._items))]
