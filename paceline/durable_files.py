"""Durable files: written and synced before they count, with their names in the directory."""

import os
from pathlib import Path


def write_durably(path: Path, data: bytes | str) -> None:
    """Writes ``data`` and syncs it; the name is durable after ``sync_directory``."""
    with path.open("wb") as stream:
        stream.write(data.encode() if isinstance(data, str) else data)
        stream.flush()
        os.fsync(stream.fileno())


def sync_directory(path: Path) -> None:
    """Makes the names in ``path`` durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_directory(path: Path) -> None:
    """Creates ``path`` and its parents, durably."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for created in missing:
        sync_directory(created.parent)
