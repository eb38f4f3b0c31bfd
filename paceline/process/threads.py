"""Daemon threads that are gone before the interpreter is.

A thread that comes back from C++ into an interpreter that is shutting down is unwound by force,
which ends the whole process with an abort: exit status 134 instead of 0. So whoever runs torch in a
thread starts it here, and has it stop when asked to.
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
    """Bound ``method`` of an object that still lives at interpreter exit runs then, before threads
    are waited for: it makes them stop."""
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
