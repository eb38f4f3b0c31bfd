"""Atomic directories: they appear whole or not at all, at whatever instant the process dies."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from paceline.ids import Step
from paceline.process.files import sync_directory

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextlib.contextmanager
def locked_directory(path: Path) -> Iterator[None]:
    """Creates ``path`` and holds its lock meanwhile. The kernel releases a dead holder's lock."""
    while True:
        path.mkdir(exist_ok=True)
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(handle, fcntl.LOCK_EX)
        # A sweeper may have come in between and removed the directory that is locked now.
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(handle).st_ino:
                break
        os.close(handle)
    try:
        yield
    finally:
        os.close(handle)


def remove_unlocked(path: Path) -> None:
    """Removes the directory ``path`` unless somebody alive holds its lock."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(handle)


def is_locked(path: Path) -> bool:
    """True if somebody alive holds the lock of the directory ``path``. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def put_in_place(finished: Path, final: Path) -> None:
    """Renames the directory ``finished`` to ``final``, and removes an older directory of that name.
    At every instant ``final`` is the old directory or the new one. (If the file system cannot
    exchange two names, an old directory is gone for an instant before the new one appears.)"""
    while True:
        try:
            finished.rename(final)
            break
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if _exchange(finished, final):
            shutil.rmtree(finished, ignore_errors=True)
            break
        old = finished.with_name(f".trash.{finished.name.lstrip('.')}")
        with contextlib.suppress(FileNotFoundError):
            final.rename(old)
        shutil.rmtree(old, ignore_errors=True)
    sync_directory(final.parent)


def fingerprint(path: Path, on_progress: Callable[[], None] = lambda: None) -> dict[str, int]:
    """Size in bytes and CRC-32 of a file, as a JSON object. Calls ``on_progress`` for every few
    MiB."""
    size = checksum = 0
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            checksum = zlib.crc32(chunk, checksum)
            size += len(chunk)
            on_progress()
    return {"size": size, "crc32": checksum}


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two names in one system call; False if that cannot be done."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, flags = _AT_FDCWD, ctypes.c_uint(_RENAME_EXCHANGE)
    return bool(rename and rename(here, os.fsencode(one), here, os.fsencode(other), flags) == 0)


_UNFINISHED = re.compile(r"\.(step-\d{6,}|trash)\..+")
_WRITTEN = re.compile(r"step-(\d{6,})\.[0-9a-f]{12}-\d+")


def remove_unfinished(root: Path) -> None:
    """Removes the unfinished directories in ``root`` whose writers are dead."""
    for path in root.iterdir():
        if _UNFINISHED.fullmatch(path.name):
            remove_unlocked(path)


def unrecorded(
    root: Path, settled: Step, recorded: Collection[str], in_use: str | None
) -> list[Path]:
    """Finished directories in ``root`` of steps before ``settled`` that are not ``recorded``, nor
    ``in_use``."""
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
