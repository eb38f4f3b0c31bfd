"""Parent-death signal of Linux. Imports nothing slow, so that it holds from the start."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent, of process id ``parent``, ends.

    If the parent has ended already, this process exits. The kernel watches the thread that started
    this process: that thread must live as long as the parent. Other systems than Linux only check
    once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
