"""Start of a process in seconds since boot: with its id it names the process, as ids are reused.

A start in Unix time would not do: the kernel derives it from the wall clock, so that it changes
whenever that clock is set. A run would then take its own living processes for ended ones.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil


def started_s(pid: int) -> float:
    """Raises psutil.NoSuchProcess if there is no such process."""
    try:
        # The name, in parentheses, may hold spaces: fields are counted behind it.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self/stat").exists():
            raise psutil.NoSuchProcess(pid) from None
        return float(psutil.Process(pid).create_time())  # no /proc: not Linux
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def age_s(started: float) -> float:
    """Seconds since ``started``, which is of ``started_s``."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    now = time.time() if boot is None else time.clock_gettime(boot)
    return max(0.0, now - started)
