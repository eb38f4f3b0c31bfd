"""Waiting for the end of a process that need not be a child of this one."""

from __future__ import annotations

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

    psutil's own wait returns once the process id has vanished. In a container that may take
    seconds, because an orphan's new parent reaps it late.
    """
    deadline = time.monotonic() + timeout_s
    while alive(process):
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True
