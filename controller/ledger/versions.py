"""Versions: the states of the model that were ever committed, and the checkpoints of some.

- A version is never used twice: after a rollback the line goes on with old newest + 1.
- ``lines`` says which step a version stands after, for every version there ever was.
- ``restore_version`` is what the state in the newest checkpoint (or the initial model) is called
  on the line that survives: holding nothing newer, a restart needs no rollback.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from controller.ledger.events import CheckpointRecorded, RolledBack

_KEPT_CHECKPOINTS = 64


@dataclass(frozen=True, slots=True)
class VersionEpoch:
    """Versions from ``first_version`` up to the next line's stand after step version - offset."""

    first_version: int
    offset: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    step: int
    version: int
    path: str


@dataclass(slots=True)
class Versions:
    step: int = 0
    """Committed steps on the surviving line."""
    version: int = 0
    """Newest committed version, the state after ``step``."""
    lines: list[VersionEpoch] = field(default_factory=lambda: [VersionEpoch(0, 0)])
    """Oldest first."""
    restore_version: int = 0
    checkpoints: list[Checkpoint] = field(default_factory=list)
    """Recorded and not abandoned, oldest first."""
    rollbacks: int = 0
    requested: int = 0
    """Step that someone asked a checkpoint of, the newest such wish; 0: none."""

    @property
    def checkpoint(self) -> Checkpoint:
        """What a fleet without any living state starts from; path "" is the initial model."""
        return self.checkpoints[-1] if self.checkpoints else Checkpoint(0, 0, "")

    def step_of(self, version: int) -> int:
        """Step that ``version`` stands after, whether its line survived or not."""
        for line in reversed(self.lines):
            if version >= line.first_version:
                return version - line.offset
        return 0

    def offset_of(self, version: int) -> int:
        return version - self.step_of(version)

    def version_of(self, step: int) -> int:
        """Version after ``step`` on the surviving line, committed already or to come."""
        for line in reversed(self.lines):
            if step >= line.first_version - line.offset:
                return step + line.offset
        return step

    def survives(self, version: int) -> bool:
        """Whether ``version`` is a state of the line that the run is on."""
        return version <= self.version and all(
            version >= line.first_version
            or self.step_of(version) <= line.first_version - line.offset
            for line in self.lines
        )

    def staleness(self, version: int, step: int) -> int:
        """Of a token of ``version`` trained in ``step``, in steps."""
        return max(0, step - 1 - self.step_of(version))

    def wanted_checkpoint(self, every: int, steps: int) -> int:
        """Step at or after which the next checkpoint is due; 0 once the last one is recorded."""
        newest = self.checkpoint.step
        return 0 if newest >= steps else min((newest // every + 1) * every, steps)

    def commit(self, version: int) -> None:
        self.step += 1
        self.version = version

    def apply_rollback(self, event: RolledBack) -> None:
        self.step = event.step
        self.version = event.version
        self.restore_version = event.version
        self.lines.append(VersionEpoch(event.version, event.version - event.step))
        self.rollbacks += 1

    def apply_checkpoint(self, event: CheckpointRecorded) -> None:
        self.checkpoints.append(Checkpoint(event.step, event.version, event.path))
        del self.checkpoints[:-_KEPT_CHECKPOINTS]
        self.restore_version = event.version

    def dump(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "version": self.version,
            "lines": [[x.first_version, x.offset] for x in self.lines],
            "restore_version": self.restore_version,
            "checkpoints": [[c.step, c.version, c.path] for c in self.checkpoints],
            "rollbacks": self.rollbacks,
            "requested": self.requested,
        }

    @classmethod
    def load(cls, data: dict[str, Any]) -> Versions:
        return cls(
            step=data["step"],
            version=data["version"],
            lines=[VersionEpoch(*x) for x in data["lines"]],
            restore_version=data["restore_version"],
            checkpoints=[Checkpoint(*c) for c in data["checkpoints"]],
            rollbacks=data["rollbacks"],
            requested=data.get("requested", 0),
        )
