"""Files and directories that only their owner can read."""

from __future__ import annotations

import os
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
