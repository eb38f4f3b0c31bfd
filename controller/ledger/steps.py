"""Policy steps: the open one, the shards of its replicas, their votes; commits and lost steps.

A step is a transaction: every member of the mesh applies it, or none does. Its composition never
changes; a reshard only gives the groups of a lost member to the others. (step, mesh epoch) identifies
one attempt at it, as a reshard always follows a new epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from controller.ledger.facts import StatValue, StepSpec
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

    def commit(self, commit: Commit, t: float, metrics: Mapping[str, float]) -> None:
        """Closes the open step, which every member has voted for."""
        assert self.open is not None
        self.history[commit.step] = self.open.groups
        self.open = None
        self.commits.append(commit)
        del self.commits[:-_COMMITS_KEPT]
        self.last_commit_t = t
        self.metrics = dict(metrics)
        self.samples_trained += int(metrics.get("samples", 0))
        self.tokens_trained += int(metrics.get("tokens", 0))

    def roll_back(self, to_step: Step) -> list[TaskId]:
        """Moves the compositions after ``to_step`` to ``replay``; the task ids in them."""
        lost = sorted(step for step in self.history if step > to_step)
        moved: list[TaskId] = []
        for step in lost:
            self.replay[step] = self.history.pop(step)
            moved.extend(self.replay[step])
        self.commits.clear()
        return moved

    def cover(self, step: Step) -> list[TaskId]:
        """Forgets the compositions that a checkpoint of ``step`` covers; the task ids in them."""
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
