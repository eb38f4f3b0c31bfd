"""Checkpoints of a run, from its listed events, and the readable links to their directories.

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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.observe.vocabulary import DOCUMENTED, EventType

MOST_CHECKPOINTS = 256
BEST = "best"
_NAME = re.compile(r"step-(\d{6,})(\..+)?")
META = "meta.json"
VOID = "void"  # File in a directory whose writer was outvoted about its weights: it is never read


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    __pydantic_config__ = DOCUMENTED

    step: int
    version: int
    path: str
    """Relative to the run directory."""
    t: float
    """Unix seconds; 0: unknown."""
    size_bytes: int
    best: bool = False
    """True if it has the highest held-out reward of the checkpoints that were evaluated."""


@dataclass(frozen=True, slots=True)
class BestCheckpoint:
    """The checkpoint with the highest held-out reward so far."""

    step: int
    path: str
    reward_mean: float


@dataclass(slots=True)
class Checkpoints:
    saved: list[SavedCheckpoint] = field(default_factory=list)
    """On the surviving line, oldest first."""
    best: BestCheckpoint | None = None

    def take(self, kind: str, event: Mapping[str, Any]) -> None:
        """Takes the next line of events.jsonl."""
        if kind == EventType.ROLLED_BACK:
            self.saved = [c for c in self.saved if c.step <= int(event["step"])]
            if not self.saved and event.get("checkpoint_path"):
                self._save(event, str(event["checkpoint_path"]))
        elif kind == EventType.CHECKPOINT_RECORDED:
            self._save(event, str(event.get("path", "")))
        elif kind == EventType.CHECKPOINT_VOIDED:
            path = str(event.get("path", ""))
            self.saved = [c for c in self.saved if c.path != path]
            if self.best is not None and self.best.path == path:
                self.best = None
        elif kind == EventType.BEST_CHECKPOINT_CHOSEN:
            score = float(event["reward_mean"])
            self.best = BestCheckpoint(int(event["step"]), str(event["path"]), score)

    def _save(self, event: Mapping[str, Any], path: str) -> None:
        step, version = int(event["step"]), int(event.get("version", 0))
        size_bytes = int(event.get("size_bytes") or 0)
        found = SavedCheckpoint(step, version, path, float(event["t"]), size_bytes)
        self.saved = [*self.saved, found][-MOST_CHECKPOINTS:]

    def kept(self, keep: int) -> list[SavedCheckpoint]:
        """Checkpoints that are on disk, newest first: the newest ``keep``, and the best one."""
        best = self.best.path if self.best is not None else ""
        marked = [replace(c, best=c.path == best) for c in self.saved]
        return [*marked[-keep:][::-1], *(c for c in marked[:-keep] if c.best)]


def set_links(run_dir: Path, event: Mapping[str, Any]) -> None:
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
