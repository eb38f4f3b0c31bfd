"""Wait for the end of a process that need not be a child of this one."""

from __future__ import annotations

import os
import select
import time

import psutil

POLL_S = 0.02


def alive(process: psutil.Process) -> bool:
    """True while that very process runs. A zombie is dead."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def wait_ended(process: psutil.Process, timeout_s: float) -> bool:
    """Blocks until ``process`` has ended, reaped or not; False after ``timeout_s`` seconds.

    The new parent of an orphan may take seconds to reap it in a container. Waiting for the process
    id to vanish, as psutil does, would take as long.
    """
    deadline = time.monotonic() + timeout_s
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):
        while alive(process) and time.monotonic() < deadline:
            # Nothing to await: it is not our child and has no descriptor.
            time.sleep(POLL_S)
        return not alive(process)
    try:
        # The id may have been reused before the descriptor was there.
        if alive(process):
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll(timeout_s * 1e3)
        return not alive(process)
    finally:
        os.close(descriptor)
