"""Private files and directories, and the number of files that a process may open."""

from __future__ import annotations

import os
import resource
from pathlib import Path


def private_directory(path: Path) -> Path:
    """Makes ``path`` and its parents if missing; ``path`` is then closed to other users."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.chmod(0o700)
    return path


def new_private_directory(path: Path) -> Path:
    """Makes ``path`` if missing, closed to other users. A directory that exists keeps its mode: its
    owner may share it on purpose, and the files in it are private anyway."""
    if not path.exists():
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def write_private(path: Path, text: str) -> None:
    """Writes a file of mode 0600; an existing one is closed to other users first."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, 0o600)
        file.truncate()
        file.write(text)


MOST_FILES = 1 << 20  # containers may allow a billion, and some libraries walk through all of them
PRIVATE = 0o077


def set_process_limits() -> None:
    """Raises the soft limit of open files to the hard one, and makes new files private. Every
    connection is an open file. The usual soft limit of 1,024 is there for programs that call
    ``select``; a fleet of 1,000 workers, or a stranger with idle connections, would use it up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    # journal, prompts, samples and configuration: a usual umask would show them to every user.
    os.umask(os.umask(PRIVATE) | PRIVATE)


def open_files_limit() -> int:
    """Soft limit of open files of this process, at most ``MOST_FILES``."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_FILES if soft == resource.RLIM_INFINITY else min(soft, MOST_FILES)
