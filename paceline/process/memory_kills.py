"""Kills for lack of memory, as the control group (cgroup v2 or v1) of a process counts them."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
NO_LIMIT_BYTES = 1 << 60  # cgroup v1 writes "no limit" as a number near the largest


@dataclass(frozen=True, slots=True)
class MemoryKills:
    cgroup: str
    kills: int  # processes of the group that were killed for lack of memory, whoever had too little
    limit_bytes: int | None = None  # of the group itself; those around it may have lower ones

    @property
    def words(self) -> str:
        """ "cgroup /demo, limit 512 MiB"."""
        limit = self.limit_bytes
        return f"cgroup {self.cgroup}{f', limit {limit >> 20} MiB' if limit is not None else ''}"


@dataclass(frozen=True, slots=True)
class _Version:
    controller: str
    mount: str
    events: str
    limit: str

    def count(self, root: Path, path: str) -> MemoryKills | None:
        # In a container the path may be the machine's, and only the group's own directory is
        # mounted.
        for group in dict.fromkeys((path, "/")):
            directory = root / self.mount / group.lstrip("/")
            if kills := re.search(
                r"^oom_kill (\d+)$", _text(directory / self.events), re.MULTILINE
            ):
                limit = _text(directory / self.limit).strip()
                limited = limit.isdigit() and int(limit) < NO_LIMIT_BYTES
                return MemoryKills(group, int(kills[1]), int(limit) if limited else None)
        return None


_VERSIONS = (
    _Version("", "sys/fs/cgroup", "memory.events", "memory.max"),
    _Version("", "sys/fs/cgroup/unified", "memory.events", "memory.max"),
    _Version("memory", "sys/fs/cgroup/memory", "memory.oom_control", "memory.limit_in_bytes"),
)


def control_groups(pid: int | str, root: Path = ROOT) -> str:
    """The control groups of process ``pid``, as the kernel lists them; empty if there is no such
    process."""
    return _text(root / "proc" / str(pid) / "cgroup")


def memory_kills(pid: int | None = None, root: Path = ROOT) -> MemoryKills | None:
    """Counter of the control group of process ``pid``; of this process by default. None if there is
    no such process, or its memory is in no control group that can be read. ``root``: directory
    under which proc and sys are."""
    for line in control_groups(pid or "self", root).splitlines():
        _, names, path = line.split(":", 2)
        for version in _VERSIONS:
            if version.controller in names.split(",") and (found := version.count(root, path)):
                return found
    return None


def count_again(known: MemoryKills, root: Path = ROOT) -> MemoryKills:
    """Counter of that group now, also after its process has ended; ``known`` if it is gone."""
    counts = (version.count(root, known.cgroup) for version in _VERSIONS)
    return next(filter(None, counts), known)


def _text(path: Path) -> str:
    """Content of a file of the kernel's; empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
