"""Policy steps: the open one, the shards of its replicas, their votes; commits and lost steps. A
step is a transaction: every member of the mesh applies it, or none does. (step, mesh epoch)
identifies one attempt at it, as a reshard always follows a new epoch. A reshard only gives the
groups of a lost member to the others. The composition of a step changes in one case: a group that
cannot be trained leaves it for good, and the step opens again with the others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from controller.ledger.specs import StatValue, StepSettings, StepSpec
from paceline.ids import MeshEpoch, Step, TaskId, Version

_COMMITS_KEPT = 16


@dataclass(frozen=True, slots=True)
class Vote:
    digest: str
    stats: Mapping[str, StatValue]


@dataclass(frozen=True, slots=True)
class OpenStep(StepSpec):
    votes: dict[str, Vote] = field(default_factory=dict)
    trials: dict[str, TaskId] = field(default_factory=dict)
    """Suspect group that a member computes by itself, by worker id; "" after its last one."""
    term: int = 0
    """The term that opened it. 0: it is from a snapshot of a release that kept none."""

    def shard(self, worker_id: str) -> tuple[TaskId, ...]:
        return tuple(self.groups[i] for i in self.shards.get(worker_id, ()))


@dataclass(frozen=True, slots=True)
class Blame:
    """Deaths of trainers that an accepted group may have caused."""

    deaths: int = 0  # Trainers that died with it in their shard
    alone: int = 0  # Deaths of trainers that were computing this group and nothing else


@dataclass(frozen=True, slots=True)
class Commit:
    step: Step
    version: Version
    mesh_epoch: MeshEpoch
    members: tuple[tuple[str, int], ...]  # (worker id, incarnation)


@dataclass(slots=True)
class StepBook:
    open: OpenStep | None = None
    history: dict[Step, tuple[TaskId, ...]] = field(default_factory=dict)
    """Compositions of committed steps that no checkpoint covers."""
    replay: dict[Step, tuple[TaskId, ...]] = field(default_factory=dict)
    """Compositions of lost and aborted steps, to be trained again as they were. A group that could
    not be trained is missing; a ready one takes its place."""
    suspects: dict[TaskId, Blame] = field(default_factory=dict)
    """Groups with which trainers died, until their step is committed."""
    nonfinite: int = 0
    """Newest commits in a row that changed no weight, as their gradient was not finite."""
    rejections: int = 0  # Attempts at a step that a group had to leave, since the last commit
    last_rejection: str = ""  # Reason of the newest of them
    settings: dict[Step, StepSettings] = field(default_factory=dict)
    """Settings of the steps in ``history`` and ``replay``."""
    commits: list[Commit] = field(default_factory=list)  # The last few, oldest first
    last_commit_t: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)  # Metrics of the newest commit
    samples_trained: int = 0
    tokens_trained: int = 0

    def settings_of(self, step: Step) -> StepSettings | None:
        """None: the step was never opened."""
        if self.open is not None and self.open.step == step:
            return self.open.settings
        return self.settings.get(step)

    def committed(self, step: Step, mesh_epoch: MeshEpoch) -> Commit | None:
        found = (c for c in self.commits if (c.step, c.mesh_epoch) == (step, mesh_epoch))
        return next(found, None)

    def commit(self, commit: Commit, t: float, metrics: Mapping[str, float]) -> None:
        """Closes the open step, which every member has voted for."""
        assert self.open is not None
        self.history[commit.step] = self.open.groups
        for task_id in self.open.groups:
            self.suspects.pop(task_id, None)
        self.rejections = 0
        self.nonfinite = self.nonfinite + 1 if metrics.get("update_skipped", 0.0) > 0 else 0
        self.settings[commit.step] = self.open.settings
        self.open = None
        self.commits.append(commit)
        del self.commits[:-_COMMITS_KEPT]
        self.last_commit_t = t
        self.metrics = dict(metrics)
        self.samples_trained += int(metrics.get("samples", 0))
        self.tokens_trained += int(metrics.get("tokens", 0))

    def missing(self, until: Step, size: int) -> int:
        """Groups that left the steps up to ``until``, of ``size`` each, which open again."""
        return sum(size - len(groups) for n, groups in self.replay.items() if n <= until)

    def leave_out(self, task_id: TaskId) -> None:
        """The group leaves the composition that it is reserved for."""
        for step, groups in self.replay.items():
            if task_id in groups:
                self.replay[step] = tuple(x for x in groups if x != task_id)

    def roll_back(self, to_step: Step) -> list[TaskId]:
        """Moves the compositions after ``to_step`` to ``replay``; the task ids in them."""
        self.commits.clear()
        lost = {step: self.history.pop(step) for step in sorted(self.history) if step > to_step}
        self.replay |= lost
        return [task_id for groups in lost.values() for task_id in groups]

    def cover(self, step: Step) -> list[TaskId]:
        """Forgets the compositions that a checkpoint of ``step`` covers; the task ids in them."""
        covered = sorted(s for s in self.history if s <= step)
        for s in covered:
            self.settings.pop(s, None)
        return [task_id for s in covered for task_id in self.history.pop(s)]


def assign_shards(
    costs: Sequence[int], members: Sequence[str], kept: Mapping[str, Sequence[int]] | None = None
) -> dict[str, tuple[int, ...]]:
    """Assigns groups to members so that their sums of ``costs`` (tokens) are balanced. Longest
    first, each to the member with the least so far; ties go to the lower rank. Groups in ``kept``
    stay with their member, which may already have computed them. The shard of each member is in the
    order of the batch."""
    kept = kept or {}
    shards = {member: list(kept.get(member, ())) for member in members}
    load = {member: sum(costs[i] for i in shard) for member, shard in shards.items()}
    assigned = {i for shard in shards.values() for i in shard}
    loose = (i for i in range(len(costs)) if i not in assigned)
    for i in sorted(loose, key=lambda i: -costs[i]):
        member = min(members, key=lambda m: (load[m], len(shards[m])))
        shards[member].append(i)
        load[member] += costs[i]
    return {member: tuple(sorted(shard)) for member, shard in shards.items()}
