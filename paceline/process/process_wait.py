"""Waiting for the end of a process that need not be a child of this one."""

from __future__ import annotations

import os
import select
import time

import psutil

POLL_S = 0.02


def alive(process: psutil.Process) -> bool:
    """Whether that process runs. A process that has ended but is not reaped yet is dead."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def wait_ended(process: psutil.Process, timeout_s: float) -> bool:
    """Blocks until ``process`` has ended, reaped or not. Returns False after ``timeout_s`` seconds.

    psutil waits for the process id to vanish. In a container that may take seconds, because an
    orphan's new parent reaps it late.
    """
    deadline = time.monotonic() + timeout_s
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):
        while alive(process) and time.monotonic() < deadline:
            # The process is not a child and the system has no descriptors for it.
            time.sleep(POLL_S)
        return not alive(process)
    try:
        # The id may have been reused before the descriptor was opened.
        if alive(process):
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            poll.poll(timeout_s * 1e3)
        return not alive(process)
    finally:
        os.close(descriptor)
