"""Kills for lack of memory, as the control group (cgroup v2 or v1) of a process counts them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/")
NO_LIMIT_BYTES = 1 << 60  # cgroup v1 writes "no limit" as a number near the largest


@dataclass(frozen=True, slots=True)
class MemoryKills:
    cgroup: str
    kills: int  # processes of the group that were killed for lack of memory, whoever had too little
    limit_bytes: int | None = None
    """Least limit of the group and of those around it; None: it has none."""
    limited: str = ""  # group that has this limit

    @property
    def words(self) -> str:
        """ "cgroup /demo, limit 512 MiB"."""
        if self.limit_bytes is None:
            return f"cgroup {self.cgroup}, which has no limit: the machine itself was out of memory"
        return f"cgroup {self.limited}, limit {self.limit_bytes / 2**20:.0f} MiB"


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
            kills = _kills(root / self.mount / group.lstrip("/") / self.events)
            if kills is not None:
                limited, limit_bytes = _least_limit(root / self.mount, group, self.limit)
                return MemoryKills(group, kills, limit_bytes, limited)
        return None


_VERSIONS = (
    _Version("", "sys/fs/cgroup", "memory.events", "memory.max"),
    _Version("", "sys/fs/cgroup/unified", "memory.events", "memory.max"),
    _Version("memory", "sys/fs/cgroup/memory", "memory.oom_control", "memory.limit_in_bytes"),
)


def control_groups(pid: int, root: Path = ROOT) -> str:
    """The control groups of process ``pid``, as the kernel lists them; empty if there is no such
    process."""
    try:
        return (root / "proc" / str(pid) / "cgroup").read_text()
    except OSError:
        return ""


def memory_kills(pid: int | None = None, root: Path = ROOT) -> MemoryKills | None:
    """Counter of the control group of process ``pid``; of this process by default. None if there is
    no such process, or its memory is in no control group that can be read. ``root``: directory
    under which proc and sys are."""
    try:
        lines = (root / "proc" / str(pid or "self") / "cgroup").read_text().splitlines()
    except OSError:
        return None
    paths = {names: path for _, names, path in (line.split(":", 2) for line in lines)}
    for names, path in paths.items():
        for version in _VERSIONS:
            if version.controller in names.split(",") and (found := version.count(root, path)):
                return found
    return None


def count_again(known: MemoryKills, root: Path = ROOT) -> MemoryKills:
    """Counter of that group now, also after its process has ended; ``known`` if it is gone."""
    counts = (version.count(root, known.cgroup) for version in _VERSIONS)
    return next(filter(None, counts), known)


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
