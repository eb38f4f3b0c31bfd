"""Parent death signal: a process that ends with its parent. Imports nothing slow."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Has the kernel kill this process when ``parent``, the process that started it, ends.

    If the parent has ended already, this process exits. The kernel watches the thread that started
    this process, so that thread must live as long as the process. On systems other than Linux this
    only checks that the parent is still there.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
