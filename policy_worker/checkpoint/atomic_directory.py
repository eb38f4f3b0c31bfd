"""Atomic directories: they appear whole or not at all, at whatever instant the process dies."""

import contextlib
import ctypes
import fcntl
import os
import re
import shutil
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from paceline.ids import Step
from paceline.process.files import sync_directory


@contextlib.contextmanager
def locked_directory(path: Path) -> Iterator[None]:
    """Creates ``path`` and holds its lock meanwhile. The kernel releases a dead holder's lock."""
    while True:
        path.mkdir(exist_ok=True)
        with _handle_of(path) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            # A sweeper may have come in between and removed the directory that is locked now.
            if path.exists() and os.path.samestat(path.stat(), os.fstat(handle)):
                yield
                return


def is_locked(path: Path) -> bool:
    """True if somebody alive holds the lock of the directory ``path``. Raises OSError."""
    with _handle_of(path) as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextlib.contextmanager
def _handle_of(path: Path) -> Iterator[int]:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield handle
    finally:
        os.close(handle)


def put_in_place(finished: Path, final: Path) -> None:
    """Renames directory ``finished`` to ``final``, which is the old or the new one at every
    instant. (A file system that cannot exchange names has neither for an instant.)"""
    paths, here = (os.fsencode(finished), os.fsencode(final)), -100  # AT_FDCWD
    exchange = getattr(ctypes.CDLL(None), "renameat2", None)  # flag 2: RENAME_EXCHANGE
    if exchange is None or exchange(here, paths[0], here, paths[1], 2) != 0:
        old = finished.with_name(f".trash.{finished.name.lstrip('.')}")
        shutil.rmtree(old, ignore_errors=True)  # of one that died between the two
        with contextlib.suppress(FileNotFoundError):
            final.rename(old)
        finished.rename(final)
        finished = old
    sync_directory(final.parent)
    shutil.rmtree(finished, ignore_errors=True)


def fingerprint(path: Path, on_progress: Callable[[], None] = lambda: None) -> dict[str, int]:
    """Size in bytes and CRC-32 of a file; ``on_progress`` is called for every few MiB."""
    size = checksum = 0
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            checksum = zlib.crc32(chunk, checksum)
            size += len(chunk)
            on_progress()
    return {"size": size, "crc32": checksum}


_UNFINISHED = re.compile(r"\.(step-\d{6,}|trash)\..+")
_WRITTEN = re.compile(r"step-(\d{6,})\.[0-9a-f]{12}-\d+")


def remove_unfinished(root: Path) -> None:
    """Removes the unfinished directories in ``root`` whose writers are dead."""
    for path in root.iterdir():
        if _UNFINISHED.fullmatch(path.name):
            remove_unlocked(path)


def remove_unlocked(path: Path) -> None:
    """Removes the directory ``path`` unless somebody alive holds its lock."""
    with contextlib.suppress(OSError), _handle_of(path) as handle:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)


def unrecorded(
    root: Path, settled: Step, recorded: Collection[str], in_use: str | None
) -> list[Path]:
    """Finished directories of steps before ``settled``, neither ``recorded`` nor ``in_use``."""
    keep = None if in_use is None else Path(in_use).resolve()
    found = []
    for path in root.iterdir():
        match = _WRITTEN.fullmatch(path.name)
        if match is None or int(match[1]) >= settled or path.name in recorded:
            continue
        with contextlib.suppress(OSError):  # another replica removes it at this moment
            if not path.is_symlink() and path.resolve() != keep and not is_locked(path):
                found.append(path)
    return found
