"""Checkpoint links: readable names for the directories that the ledger recorded.

    checkpoints/step-000123.<writer>    the directory; its name is never used twice
    checkpoints/step-000123          ─► the directory that was recorded for that step
    checkpoints/best                 ─► the one with the highest held-out reward

The leader sets a link after the record is durable, and replaces it atomically. The ledger names
directories, never links: a link that is missing or old misleads no restore.
"""

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.observe.vocabulary import EventType

BEST = "best"
_NAME = re.compile(r"step-(\d{6,})(\..+)?")
META = "meta.json"
VOID = "void"  # File in a directory whose writer was outvoted about its weights: it is never read


def follow(run_dir: Path, event: Mapping[str, Any]) -> None:
    """Sets the links after ``event``, a durable one. Raises OSError."""
    kind = event.get("type")
    if kind not in (
        EventType.CHECKPOINT_RECORDED,
        EventType.CHECKPOINT_VOIDED,
        EventType.BEST_CHECKPOINT_CHOSEN,
    ):
        return
    directory = run_dir / "checkpoints" / Path(str(event["path"])).name
    link = directory.with_name(
        BEST if kind == EventType.BEST_CHECKPOINT_CHOSEN else _link_name(directory)
    )
    if kind == EventType.CHECKPOINT_VOIDED:
        unlink(directory)
        with contextlib.suppress(FileNotFoundError):  # its writer has deleted it already
            (directory / VOID).touch()
    elif link != directory and (directory / META).is_file():
        partial = link.with_name(f".link.{link.name}.{os.getpid()}")
        partial.unlink(missing_ok=True)
        partial.symlink_to(directory.name)
        partial.replace(link)


def unlink(directory: Path) -> None:
    """Removes the links to a checkpoint that is about to be deleted."""
    for link in (directory.with_name(_link_name(directory)), directory.with_name(BEST)):
        with contextlib.suppress(OSError):
            if str(link.readlink()) == directory.name:
                link.unlink()


def complete(directory: Path) -> list[Path]:
    """Complete checkpoints in ``directory``, oldest step first: the link of each step, or the
    newest directory of a step without one (nothing recorded it yet). Voided ones are left out."""
    found: dict[int, tuple[bool, float, Path]] = {}
    for path in directory.iterdir() if directory.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and (path / META).is_file() and not (path / VOID).exists():
            candidate = (match[2] is None, path.stat().st_mtime, path)
            found[int(match[1])] = max(candidate, found.get(int(match[1]), candidate))
    return [found[step][2] for step in sorted(found)]


def is_checkpoint_name(name: str) -> bool:
    """Return True if a directory or link of this name may be a checkpoint."""
    return _NAME.fullmatch(name) is not None


def _link_name(directory: Path) -> str:
    return directory.name.partition(".")[0]
