"""Guard of one scoring process: ends every process that a reward started, whatever group it is in.

    worker ──► guard ──► scoring process ──► what rewards start
               adopts what loses its parent; kills all of it once the scoring process ends,
               or once the worker closes its end of a pipe, or ends

The guard is the subreaper of what is below it, so a process that a reward puts into a session of
its own stays below the guard as well. Imports nothing slow: psutil only to kill.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from typing import NoReturn

_PR_SET_CHILD_SUBREAPER = 36
_AGAIN_S = 0.05


def guard(life_fd: int) -> None:
    """Forks. Returns in the scoring process; the guard itself stays in here and ends with its
    status.

    ``life_fd``: read end of a pipe; the worker holds the write end until the processes are to end.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    ended_read, ended_write = os.pipe()
    scoring = os.fork()
    if scoring == 0:
        # The kernel closes the other end with this process: the guard sees it at once.
        os.close(ended_read)
        os.close(life_fd)
        return
    os.close(ended_write)
    try:
        # Otherwise the worker would not see the end of the scoring process's output.
        os.closerange(0, 3)
        select.select([life_fd, ended_read], [], [])
    finally:
        _end(_kill_all(scoring))


def _kill_all(scoring: int) -> int:
    """Kills and reaps all descendants. Returns the wait status of the scoring process."""
    status = 0
    while True:
        _kill_descendants()
        try:
            pid, found = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == scoring:
            status = found
        if pid == 0:
            # A killed process needs a moment to end; those that it leaves come to this one.
            select.select([], [], [], _AGAIN_S)


def _kill_descendants() -> None:
    import psutil

    try:
        for process in psutil.Process().children(recursive=True):
            process.kill()
    except psutil.Error:
        pass  # it ended meanwhile: the next round sees what is left


def _end(status: int) -> NoReturn:
    """Ends this process as the scoring process ended, which the worker reports."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)
