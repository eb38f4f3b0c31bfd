"""Steps: what is in the open one, who computes which of its groups, and who has voted.

A step is a transaction: every member of the mesh applies it, or none does. Its composition never
changes; only who computes what does, and only a lost member's groups move.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from controller.ledger.commands import StatValue
from controller.ledger.events import (
    StepCommitted,
    StepOpened,
    StepResharded,
    VoteCast,
    stats_from_json,
    stats_to_json,
)

_COMMITS_KEPT = 16


@dataclass(frozen=True, slots=True)
class Vote:
    digest: str
    stats: Mapping[str, StatValue]


@dataclass(slots=True)
class OpenStep:
    step: int
    version: int
    """Of the state before it."""
    groups: tuple[str, ...]
    shards: dict[str, tuple[int, ...]]
    """Worker id to positions in ``groups``."""
    mesh_epoch: int
    replay: bool = False
    votes: dict[str, Vote] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Commit:
    """Who may still ask for the outcome of a committed step."""

    step: int
    version: int
    mesh_epoch: int
    members: tuple[tuple[str, int], ...]
    """(worker id, incarnation)."""


@dataclass(slots=True)
class StepBook:
    open: OpenStep | None = None
    history: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Compositions of committed steps that no checkpoint covers."""
    replay: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Compositions of lost steps, to be trained again as they were."""
    commits: list[Commit] = field(default_factory=list)
    """The last few, oldest first."""
    last_commit_t: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the newest commit."""
    samples_trained: int = 0
    tokens_trained: int = 0
    """Over all commits, those of lost steps included."""

    def committed(self, step: int, mesh_epoch: int) -> Commit | None:
        for commit in reversed(self.commits):
            if (commit.step, commit.mesh_epoch) == (step, mesh_epoch):
                return commit
        return None

    def apply_opened(self, event: StepOpened) -> None:
        if event.replay:
            del self.replay[event.step]
        self.open = OpenStep(
            step=event.step,
            version=event.version,
            groups=event.groups,
            shards=dict(event.shards),
            mesh_epoch=event.mesh_epoch,
            replay=event.replay,
        )

    def apply_resharded(self, event: StepResharded) -> None:
        assert self.open is not None
        self.open.mesh_epoch = event.mesh_epoch
        self.open.shards = dict(event.shards)
        self.open.votes = {}

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

    def apply_rollback(self, to_step: int) -> list[str]:
        """Moves the compositions after ``to_step`` to ``replay``; the task ids in them."""
        lost = sorted(step for step in self.history if step > to_step)
        moved: list[str] = []
        for step in lost:
            self.replay[step] = self.history.pop(step)
            moved.extend(self.replay[step])
        self.commits.clear()
        return moved

    def apply_checkpoint(self, step: int) -> list[str]:
        """Task ids that a checkpoint of ``step`` covers."""
        covered = sorted(s for s in self.history if s <= step)
        return [task_id for s in covered for task_id in self.history.pop(s)]

    def dump(self) -> dict[str, Any]:
        return {
            "open": _dump_open(self.open),
            "history": [[s, list(g)] for s, g in self.history.items()],
            "replay": [[s, list(g)] for s, g in self.replay.items()],
            "commits": [
                [c.step, c.version, c.mesh_epoch, [list(m) for m in c.members]]
                for c in self.commits
            ],
            "last_commit_t": self.last_commit_t,
            "metrics": dict(self.metrics),
            "samples_trained": self.samples_trained,
            "tokens_trained": self.tokens_trained,
        }

    @classmethod
    def load(cls, data: dict[str, Any]) -> StepBook:
        return cls(
            open=_load_open(data["open"]),
            history={s: tuple(g) for s, g in data["history"]},
            replay={s: tuple(g) for s, g in data["replay"]},
            commits=[
                Commit(s, v, e, tuple((w, i) for w, i in members))
                for s, v, e, members in data["commits"]
            ],
            last_commit_t=data["last_commit_t"],
            metrics=dict(data["metrics"]),
            samples_trained=data["samples_trained"],
            tokens_trained=data["tokens_trained"],
        )


def assign_shards(
    costs: Sequence[int],
    members: Sequence[str],
    kept: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Deals groups to members so that their sums of ``costs`` (tokens) are balanced.

    Longest first, each to the member with the least so far; ties go to the lower rank. Groups in
    ``kept`` stay with their member, which may already have computed them. The shard of each member
    is in the order of the batch.
    """
    kept = kept or {}
    shards = {member: list(kept.get(member, ())) for member in members}
    load = [sum(costs[i] for i in shards[member]) for member in members]
    dealt = {i for shard in shards.values() for i in shard}
    loose = sorted((i for i in range(len(costs)) if i not in dealt), key=lambda i: (-costs[i], i))
    for i in loose:
        rank = min(range(len(members)), key=lambda r: (load[r], len(shards[members[r]]), r))
        shards[members[rank]].append(i)
        load[rank] += costs[i]
    return {member: tuple(sorted(shard)) for member, shard in shards.items()}


def _dump_open(step: OpenStep | None) -> dict[str, Any] | None:
    if step is None:
        return None
    return {
        "step": step.step,
        "version": step.version,
        "groups": list(step.groups),
        "shards": {k: list(v) for k, v in step.shards.items()},
        "mesh_epoch": step.mesh_epoch,
        "replay": step.replay,
        "votes": {k: [v.digest, stats_to_json(v.stats)] for k, v in step.votes.items()},
    }


def _load_open(data: dict[str, Any] | None) -> OpenStep | None:
    if data is None:
        return None
    special = {
        "groups": tuple(data["groups"]),
        "shards": {k: tuple(v) for k, v in data["shards"].items()},
        "votes": {k: Vote(d, stats_from_json(s)) for k, (d, s) in data["votes"].items()},
    }
    return OpenStep(**{**data, **special})
