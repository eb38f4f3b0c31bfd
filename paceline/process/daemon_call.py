"""Blocking calls in daemon threads, for calls that may never return: a file on a dead mount.

A call in the event loop's own thread pool would keep the process from ending, because the pool is
joined.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


async def in_daemon_thread(work: Callable[[], T], name: str) -> T:
    """The result of ``work``. If the caller is cancelled, the thread goes on and nobody waits for
    it."""
    return await asyncio.get_running_loop().run_in_executor(_DaemonThread(name), work)


def call_within(limit_s: float, work: Callable[[], T], name: str) -> T:
    """The result of ``work``. After ``limit_s`` it raises TimeoutError; the thread goes on and
    nobody waits for it."""
    result: T = _DaemonThread(name).submit(work).result(limit_s)
    return result


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
