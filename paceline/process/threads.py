"""Daemon threads that end before the interpreter does.

A thread that returns from C++ into an interpreter that is shutting down aborts the whole process:
exit status 134 instead of 0. Threads that run torch are therefore started here, and stop on request.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

_AT_MOST_S = 5.0

exiting = threading.Event()
"""Set when the interpreter starts to shut down."""

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_hooks: list[weakref.WeakMethod[Callable[[], None]]] = []


def start(target: Callable[..., object], name: str, args: Iterable[Any] = ()) -> threading.Thread:
    """Starts a daemon thread that interpreter exit waits for, up to a limit."""
    thread = threading.Thread(target=target, name=name, args=tuple(args), daemon=True)
    _threads.add(thread)
    thread.start()
    return thread


def on_exit(method: Callable[[], None]) -> None:
    """Calls the bound ``method`` at interpreter exit, before threads are joined, to stop them. It is
    skipped if its object is gone by then."""
    _hooks[:] = [hook for hook in _hooks if hook() is not None]
    _hooks.append(weakref.WeakMethod(method))


def join(threads: Iterable[threading.Thread], timeout_s: float) -> bool:
    """Waits for all, except the calling thread; false at the timeout."""
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
