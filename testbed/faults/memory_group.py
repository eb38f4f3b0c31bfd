"""A control group with a limit of memory, for processes under test that the kernel shall kill.
Needs root."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LIMIT_MB = 64
MOUNTS = (("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"))
"""cgroup v2 and v1: where groups are, and the file with the limit."""


@contextmanager
def memory_group(name: str, limit_mb: int = LIMIT_MB) -> Iterator[Path | None]:
    """The group's directory; None if none can be made here. Its processes must have ended at the
    end."""
    for mount, limit in MOUNTS:
        path = Path(mount) / name
        try:
            path.mkdir()
        except OSError:
            continue
        try:
            if not (path / limit).exists():
                continue
            try:
                (path / limit).write_text(str(limit_mb << 20))
            except OSError:
                continue
            yield path
            return
        finally:
            _remove(path)
    yield None


def enter(group: Path, pid: int) -> None:
    """What process ``pid`` takes from now on is counted for the group."""
    (group / "cgroup.procs").write_text(str(pid))


def members(group: Path) -> list[int]:
    return [int(pid) for pid in (group / "cgroup.procs").read_text().split()]


def _remove(path: Path) -> None:
    deadline = time.monotonic() + 10.0
    while True:
        try:
            path.rmdir()
            return
        except OSError:
            # The kernel still takes the dead process out of it.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def name_of(what: str) -> str:
    """A name that no other process of this machine uses."""
    return f"paceline-{what}-{os.getpid()}"
