"""Policy steps: the open one, the shards of its replicas, their votes; commits and lost steps.

A step is a transaction: every member of the mesh applies it, or none does. Its composition never
changes; a reshard only gives the groups of a lost member to the others. (step, mesh epoch) identifies
one attempt at it, as a reshard always follows a new epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from controller.ledger.events import StepCommitted, StepOpened, StepResharded, VoteCast
from controller.ledger.facts import StatValue, StepSpec, values
from paceline.ids import MeshEpoch, Step, TaskId, Version

_COMMITS_KEPT = 16


@dataclass(frozen=True, slots=True)
class Vote:
    digest: str
    stats: Mapping[str, StatValue]


@dataclass(frozen=True, slots=True)
class OpenStep(StepSpec):
    votes: dict[str, Vote] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Commit:
    """A committed step, and the members that may still ask for its outcome."""

    step: Step
    version: Version
    mesh_epoch: MeshEpoch
    members: tuple[tuple[str, int], ...]
    """(worker id, incarnation)."""


@dataclass(slots=True)
class StepBook:
    open: OpenStep | None = None
    history: dict[Step, tuple[TaskId, ...]] = field(default_factory=dict)
    """Compositions of committed steps that no checkpoint covers."""
    replay: dict[Step, tuple[TaskId, ...]] = field(default_factory=dict)
    """Compositions of lost steps, to be trained again as they were."""
    commits: list[Commit] = field(default_factory=list)
    """The last few, oldest first."""
    last_commit_t: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the newest commit."""
    samples_trained: int = 0
    tokens_trained: int = 0
    """Over all commits, those of lost steps included."""

    def committed(self, step: Step, mesh_epoch: MeshEpoch) -> Commit | None:
        for commit in reversed(self.commits):
            if (commit.step, commit.mesh_epoch) == (step, mesh_epoch):
                return commit
        return None

    def apply_opened(self, event: StepOpened) -> None:
        if event.replay:
            del self.replay[event.step]
        self.open = OpenStep(*values(StepSpec, event))

    def apply_resharded(self, event: StepResharded) -> None:
        assert self.open is not None
        self.open = replace(self.open, mesh_epoch=event.mesh_epoch, shards=event.shards, votes={})

    def apply_vote(self, event: VoteCast) -> None:
        assert self.open is not None
        self.open.votes[event.worker_id] = Vote(event.digest, event.stats)

    def apply_committed(self, event: StepCommitted, members: Iterable[tuple[str, int]]) -> None:
        step = self.open
        assert step is not None
        self.open = None
        self.history[event.step] = step.groups
        self.commits.append(Commit(event.step, event.version, step.mesh_epoch, tuple(members)))
        del self.commits[:-_COMMITS_KEPT]
        self.last_commit_t = event.t
        self.metrics = dict(event.metrics)
        self.samples_trained += int(event.metrics.get("samples", 0))
        self.tokens_trained += int(event.metrics.get("tokens", 0))

    def apply_rollback(self, to_step: Step) -> list[TaskId]:
        """Moves the compositions after ``to_step`` to ``replay``; the task ids in them."""
        lost = sorted(step for step in self.history if step > to_step)
        moved: list[TaskId] = []
        for step in lost:
            self.replay[step] = self.history.pop(step)
            moved.extend(self.replay[step])
        self.commits.clear()
        return moved

    def apply_checkpoint(self, step: Step) -> list[TaskId]:
        """Task ids that a checkpoint of ``step`` covers."""
        covered = sorted(s for s in self.history if s <= step)
        return [task_id for s in covered for task_id in self.history.pop(s)]


def assign_shards(
    costs: Sequence[int],
    members: Sequence[str],
    kept: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Assigns groups to members so that their sums of ``costs`` (tokens) are balanced.

    Longest first, each to the member with the least so far; ties go to the lower rank. Groups in
    ``kept`` stay with their member, which may already have computed them. The shard of each member
    is in the order of the batch.
    """
    kept = kept or {}
    shards = {member: list(kept.get(member, ())) for member in members}
    load = [sum(costs[i] for i in shards[member]) for member in members]
    assigned = {i for shard in shards.values() for i in shard}
    loose = sorted(
        (i for i in range(len(costs)) if i not in assigned), key=lambda i: (-costs[i], i)
    )
    for i in loose:
        rank = min(range(len(members)), key=lambda r: (load[r], len(shards[members[r]]), r))
        shards[members[rank]].append(i)
        load[rank] += costs[i]
    return {member: tuple(sorted(shard)) for member, shard in shards.items()}
