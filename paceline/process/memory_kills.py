"""Kills for lack of memory, as a process's control group (cgroup v2 and v1) and the kernel's log
tell of them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/")
NO_LIMIT_BYTES = 1 << 60
"""cgroup v1 writes "no limit" as a number near the largest."""
MOST_LOG_BYTES = 1 << 22
CLOCKS_S = 2.0
"""The log's clock and the monotonic one differ by less."""
_RECORD_BYTES = 1 << 14
"""The kernel refuses to read a record of its log into less."""
_V2_MOUNTS = ("sys/fs/cgroup", "sys/fs/cgroup/unified")
_V1_MOUNT = "sys/fs/cgroup/memory"


@dataclass(frozen=True, slots=True)
class MemoryKills:
    """What the kernel counts for the control group of a process."""

    cgroup: str
    kills: int
    """Processes of the group that were killed for lack of memory, whoever had too little."""
    limit_bytes: int | None = None
    """Least limit of the group and of those around it; None: it has none."""
    limited: str = ""
    """Group that has this limit."""

    @property
    def words(self) -> str:
        """ "cgroup /demo, limit 512 MiB"."""
        if self.limit_bytes is None:
            return f"cgroup {self.cgroup}, which has no limit: the machine itself was out of memory"
        return f"cgroup {self.limited}, limit {self.limit_bytes / 2**20:.0f} MiB"


def memory_kills(pid: int | None = None, root: Path = ROOT) -> MemoryKills | None:
    """Counter of the control group of process ``pid``; of this process by default.

    None if there is no such process, or its memory is in no control group that can be read.
    ``root``: directory under which proc and sys are.
    """
    try:
        lines = (root / "proc" / str(pid or "self") / "cgroup").read_text().splitlines()
    except OSError:
        return None
    paths = {names: path for _, names, path in (line.split(":", 2) for line in lines)}
    if "" in paths:
        for mount in _V2_MOUNTS:
            if found := _count(root / mount, paths[""], "memory.events", "memory.max"):
                return found
    for names, path in paths.items():
        if "memory" in names.split(","):
            return _count(root / _V1_MOUNT, path, "memory.oom_control", "memory.limit_in_bytes")
    return None


def count_again(known: MemoryKills, root: Path = ROOT) -> MemoryKills:
    """The same group now, also after its process has ended; ``known`` if the group is gone."""
    for mount, events, limit in (
        *((mount, "memory.events", "memory.max") for mount in _V2_MOUNTS),
        (_V1_MOUNT, "memory.oom_control", "memory.limit_in_bytes"),
    ):
        if found := _count(root / mount, known.cgroup, events, limit):
            return found
    return known


def _count(mount: Path, path: str, events: str, limit: str) -> MemoryKills | None:
    # In a container the path may be the machine's, and only the group's own directory is mounted.
    for group in dict.fromkeys((path, "/")):
        kills = _kills(mount / group.lstrip("/") / events)
        if kills is not None:
            limited, limit_bytes = _least_limit(mount, group, limit)
            return MemoryKills(group, kills, limit_bytes, limited)
    return None


def _kills(path: Path) -> int | None:
    try:
        found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


def _least_limit(mount: Path, group: str, name: str) -> tuple[str, int | None]:
    """(group, bytes) of the least limit from ``group`` up to the mount."""
    least: tuple[str, int | None] = ("", None)
    at = PurePosixPath(group)
    for path in (at, *at.parents):
        try:
            text = (mount / str(path).lstrip("/") / name).read_text().strip()
        except OSError:
            continue
        value = int(text) if text.isdigit() else NO_LIMIT_BYTES
        if value < NO_LIMIT_BYTES and (least[1] is None or value < least[1]):
            least = (str(path), value)
    return least


def kernel_log_kill(pid: int, since_s: float, log: Path = ROOT / "dev/kmsg") -> str:
    """The kernel's own line about its kill of process ``pid``, the newest; empty if it has none, or
    its log cannot be read. In a container process ids are others than the kernel's.

    ``since_s``: seconds of the monotonic clock; an earlier process of that id is not meant.
    """
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return ""
    found, seen = "", b""
    try:
        while len(seen) < MOST_LOG_BYTES:
            try:
                record = os.read(descriptor, _RECORD_BYTES)
            except BrokenPipeError:
                continue  # records were overwritten meanwhile: the next read goes on
            if not record:
                break
            seen += record
    except OSError:
        pass  # the end, of a log that never ends
    finally:
        os.close(descriptor)
    for line in seen.decode(errors="replace").splitlines():
        head, _, text = line.partition(";")
        microseconds = head.split(",")[2:3]
        if not microseconds or not microseconds[0].isdigit():
            continue  # a further line of a record
        late = int(microseconds[0]) / 1e6 >= since_s - CLOCKS_S
        if late and re.search(rf"Killed process {pid}\b", text):
            found = text
    return found.strip()
