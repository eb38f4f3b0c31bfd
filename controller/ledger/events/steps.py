"""Events of policy steps: opening, votes, commit or abort, rollbacks, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping

from controller.ledger.events.event import Event, Severity, Topic, event
from controller.ledger.facts import Ballot, StepSpec
from paceline.ids import MeshEpoch, Step, Version

_LEASES = frozenset({Topic.LEASE, Topic.ISOLATED})


@event
class StepOpened(StepSpec, Event):
    wakes = frozenset({Topic.PLAN})
    directs = False
    listed = False

    def text(self) -> str:
        return f"step {self.step} opened with {len(self.groups)} groups"


@event
class StepResharded(Event):
    """The open step goes on in a new epoch; the groups of a lost member are with the others."""

    step: Step
    mesh_epoch: MeshEpoch
    shards: Mapping[str, tuple[int, ...]]

    wakes = frozenset({Topic.PLAN, Topic.VOTE})
    directs = False

    def text(self) -> str:
        return f"step {self.step} resharded over mesh epoch {self.mesh_epoch}"


@event
class VoteCast(Ballot, Event):
    directs = False
    listed = False

    def text(self) -> str:
        return f"{self.worker_id} voted for step {self.step}"


@event
class StepCommitted(Event):
    """Every member of the epoch voted for it, with equal weights. ``version`` is the state after."""

    step: Step
    version: Version
    metrics: Mapping[str, float]
    t: float

    wakes = _LEASES | {Topic.VOTE}

    def text(self) -> str:
        return f"step {self.step} committed, reward {self.metrics.get('reward_mean', math.nan):.3f}"


@event
class StepAborted(Event):
    """No member of the step is left: its groups are ready again."""

    step: Step
    reason: str

    wakes = _LEASES | {Topic.VOTE}
    severity = Severity.WARNING

    def text(self) -> str:
        return f"step {self.step} aborted: {self.reason.replace('_', ' ')}"


@event
class RolledBack(Event):
    """No living replica holds the newest state: the run is after ``step`` again, as ``version``."""

    step: Step
    version: Version
    from_step: Step
    from_version: Version
    checkpoint_path: str

    wakes = _LEASES
    severity = Severity.WARNING

    def text(self) -> str:
        return (
            f"run rolled back from step {self.from_step} to step {self.step}: "
            "no replica holds the newest state"
        )


@event
class CheckpointRecorded(Event):
    worker_id: str
    step: Step
    version: Version
    path: str
    size_bytes: int
    seconds: float

    def text(self) -> str:
        return f"checkpoint of step {self.step}: {self.path}"
