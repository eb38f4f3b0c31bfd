"""Ends with the process that started this one. Imports nothing slow: it is to hold from the start."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """From here on the kernel kills this process when ``parent``, the process id of the one that
    started it, ends, however it ends; where it has ended already, this process exits.

    The kernel goes by the thread that started this process: that thread must live as long as the
    tie is to hold. On other systems than Linux only the check is made.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
