"""Daemon threads that end before the interpreter shuts down.

If a thread returns from C++ into an interpreter that is shutting down, the process aborts with exit
status 134 instead of 0. Threads that run torch are therefore started here and stop when asked.
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
    """Starts a daemon thread. The interpreter's exit waits for it, up to a limit."""
    thread = threading.Thread(target=target, name=name, args=tuple(args), daemon=True)
    _threads.add(thread)
    thread.start()
    return thread


def on_exit(method: Callable[[], None]) -> None:
    """Registers a bound method that makes threads stop.

    It is called at interpreter exit, before the threads are waited for, if its object is still
    alive.
    """
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
