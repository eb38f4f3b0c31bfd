"""Lifetime of a process: its start, the wait for its end, its end with its parent, and its exit.

Imports nothing slow.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from paceline.errors import Unreachable, UserError, can_pass
from paceline.masking import masked

if TYPE_CHECKING:
    import asyncio

    import psutil

POLL_S = 0.02
ENGINE_LOST = 3
"""Exit status of a rollout worker whose engine died while it generated, perhaps because of a
prompt."""
TRY_AGAIN = 75
"""Exit status of a process that met what can pass."""
_PR_SET_PDEATHSIG = 1


def started_s(pid: int) -> float:
    """Raises psutil.NoSuchProcess if there is no such process."""
    import psutil

    try:
        # The name, in parentheses, may hold spaces: fields are counted behind it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self/stat").exists():
            raise psutil.NoSuchProcess(pid) from None
        return float(psutil.Process(pid).create_time())  # no /proc: not Linux
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def alive(process: psutil.Process) -> bool:
    """True if that process runs. A process that has ended but is not reaped yet is dead."""
    import psutil

    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def recorded_process(path: Path) -> psutil.Process | None:
    """The process whose id and start are the first words of the file ``path``; None if it has
    ended: its id may be another's by now."""
    import psutil

    try:
        pid, started = path.read_text().split()[:2]
        process = psutil.Process(int(pid))
        same = started_s(process.pid) == float(started)
    except (OSError, ValueError, psutil.Error):
        return None
    return process if same and alive(process) else None


def wait_ended(process: psutil.Process, timeout_s: float) -> bool:
    """Blocks until ``process`` has ended, reaped or not. Returns False after ``timeout_s`` seconds.
    psutil's own wait returns once the process id has vanished. In a container that may take
    seconds, because an orphan's new parent reaps it late."""
    deadline = time.monotonic() + timeout_s
    while alive(process):
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


def die_with(parent: int) -> None:
    """Has the kernel kill this process when ``parent``, the process that started it, ends. If the
    parent has ended already, this process exits. The kernel watches the thread that started this
    process, so that thread must live as long as the process. On systems other than Linux this only
    checks that the parent is still there."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def leave_on_signal(
    begin: Callable[[], object], grace_s: float, loop: asyncio.AbstractEventLoop | None = None
) -> None:
    """The first SIGTERM or SIGINT of this process calls ``begin``, in ``loop`` or between two
    instructions of the main thread, where it must not block. A second one ends the process at once,
    and so does the end of ``grace_s`` seconds. Only for the main thread."""

    def first(number: int) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)
        limit = threading.Timer(grace_s, end, (number,))
        limit.daemon = True
        limit.start()
        begin()

    def end(number: int) -> None:
        os.kill(os.getpid(), number)
        os._exit(128 + number)  # the first process of a container does not die of a signal

    numbers = signal.SIGTERM, signal.SIGINT
    for number in numbers:
        if loop is None:
            signal.signal(number, lambda number, _: first(number))
        else:
            loop.add_signal_handler(number, first, number)


def leave(status: int) -> NoReturn:
    """Ends the process with ``status`` at once. Tearing down an interpreter with torch and its
    threads takes seconds, and the supervisor would wait for them. Files must be closed and children
    ended before the call."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # The reader of the stream may have gone
            stream.flush()
    os._exit(status)


def exit_status(main: Callable[[], int], program: str) -> int:
    """Runs ``main`` and returns the exit status. A ``UserError`` is printed after the program's
    name, without a traceback, and has its own status."""
    try:
        return main()
    except UserError as error:
        for line in str(error).splitlines():
            print(f"{program}: {masked(line)}", file=sys.stderr)
        # A worker's status 3 is ENGINE_LOST: an unreachable controller must not look like one.
        status = 1 if isinstance(error, Unreachable) else error.exit_status
        return TRY_AGAIN if status != ENGINE_LOST and can_pass(error) else status
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        print(masked(traceback.format_exc()), end="", file=sys.stderr)
        return TRY_AGAIN if can_pass(error) else 1


def leave_after(main: Callable[[], int], program: str = "error") -> NoReturn:
    """Ends the process with the exit status of ``main``, at once even if ``main`` raises. A thread
    stuck in a collective would keep the interpreter alive forever, and the supervisor would wait
    for it instead of starting the process again."""
    leave(exit_status(main, program))
