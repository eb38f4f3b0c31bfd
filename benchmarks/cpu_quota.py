"""CPU quota of a process: a control group that gives it so much of a core. Needs root, and Linux."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PERIOD_US = 10_000
"""Short: what a quota delays, it delays by less than this."""
ROOT = Path("/sys/fs/cgroup")


@contextmanager
def cpu_quota(cores: float) -> Iterator[Path]:
    """A group whose processes have ``cores`` of CPU time together; write their ids to the file.

    Raises SystemExit if this machine lets nobody make such a group.
    """
    first = (ROOT / "cpu" / "cpu.cfs_period_us").exists()  # version 1 of control groups
    group = (ROOT / "cpu" if first else ROOT) / f"paceline-{os.getpid()}"
    quota = round(cores * PERIOD_US)
    try:
        group.mkdir()
        if first:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
    except OSError as error:
        raise SystemExit(
            f"no CPU quota on this machine: {error}. Leave --leader-cores out"
        ) from error
    try:
        yield group / "cgroup.procs"
    finally:
        group.rmdir()  # its processes have ended
