"""Litter of dead writers: unfinished directories, and finished ones that the ledger never recorded.

A directory is unfinished as long as its name begins with a dot; its living writer holds its lock. A
finished one of a settled step is recorded already, or never: the ledger refuses the record of a
writer that is later. Whatever does not bear a writer's name (links, copies by hand, checkpoints of
earlier releases) is left alone.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection
from pathlib import Path

from paceline.ids import Step
from policy_worker.checkpoint.atomic_directory import is_locked, remove_unlocked

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
