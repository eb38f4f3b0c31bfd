"""Events of policy steps: opening, votes, commit or abort, rollbacks, checkpoints."""

import math
from collections.abc import Mapping
from dataclasses import replace

from controller.ledger.enums import DropReason, Role
from controller.ledger.events.event import LEASES, PLANS, Event, Topic, event
from controller.ledger.specs import StatValue, StepSpec, values
from controller.ledger.state.fleet import Failures
from controller.ledger.state.state import State
from controller.ledger.state.steps import Blame, Commit, OpenStep, Vote
from controller.ledger.state.tasks import TaskState
from controller.ledger.state.versions import Checkpoint
from paceline.ids import MeshEpoch, Step, TaskId, Version
from paceline.observe.vocabulary import Severity

FORGIVEN_EVERY = 8  # Versions after which one fault of each relay is forgotten


@event(wakes=frozenset({Topic.PLAN}), directs=False, listed=False)
class StepOpened(StepSpec, Event):
    def apply(self, s: State) -> None:
        kept = set(s.steps.replay.pop(self.step, ()))
        s.tasks.move_all((x for x in self.groups if x not in kept), TaskState.IN_STEP)
        s.steps.open = OpenStep(**values(StepSpec, self), term=s.term)


@event(wakes=PLANS, directs=False, words="step {0.step} resharded over mesh epoch {0.mesh_epoch}")
class StepResharded(Event):
    """The open step goes on in a new epoch; the groups of a lost member are with the others."""

    step: Step
    mesh_epoch: MeshEpoch
    shards: Mapping[str, tuple[int, ...]]

    def apply(self, s: State) -> None:
        assert s.steps.open is not None
        s.steps.open = replace(
            s.steps.open, mesh_epoch=self.mesh_epoch, shards=self.shards, votes={}, trials={}
        )


@event(directs=False, listed=False)
class VoteCast(Event):
    worker_id: str
    incarnation: int
    step: Step
    mesh_epoch: MeshEpoch
    digest: str
    stats: Mapping[str, StatValue]

    def apply(self, s: State) -> None:
        assert s.steps.open is not None
        s.steps.open.votes[self.worker_id] = Vote(self.digest, self.stats)


@event(wakes=LEASES | {Topic.VOTE}, severity=Severity.ROUTINE)
class StepCommitted(Event):
    """Every member voted for it, with equal weights. ``version`` is the state after."""

    step: Step
    version: Version
    metrics: Mapping[str, float]
    t: float

    def apply(self, s: State) -> None:
        step, mesh = s.steps.open, s.fleet.mesh
        assert step is not None and mesh is not None
        s.tasks.move_all(step.groups, TaskState.TRAINED)
        members = tuple(member.who for member in mesh.members)
        commit = Commit(self.step, self.version, step.mesh_epoch, members)
        s.steps.commit(commit, self.t, self.metrics)
        s.tasks.dropped_groups.clear()
        s.versions.step, s.versions.version = self.step, self.version
        if self.version % FORGIVEN_EVERY == 0:
            # A relay that fails now and then, because an evaluation held it up, stays in use.
            for worker in s.fleet.living(Role.ROLLOUT):
                worker.relay_faults = max(0, worker.relay_faults - 1)
        s.fleet.former.clear()
        s.agree(step.version, next(iter(step.votes.values())).digest)
        # All members voted: from here on each holds the new state, or has lost its state.
        for worker in s.fleet.members():
            worker.state_version = self.version
            worker.failures = Failures()

    def text(self) -> str:
        name = "reward" if "reward_mean" in self.metrics else "loss"
        shown = self.metrics.get("reward_mean", self.metrics.get("loss", math.nan))
        return f"step {self.step} committed, {name} {shown:.3f}"


@event(directs=False, listed=False)
class GroupTried(Event):
    """A member computes this suspect group next, by itself; "": it has computed its last one."""

    worker_id: str
    step: Step
    task_id: TaskId

    def apply(self, s: State) -> None:
        assert s.steps.open is not None
        s.steps.open.trials[self.worker_id] = self.task_id


@event(directs=False, listed=False)
class GroupsBlamed(Event):
    """A trainer died with these groups, any of which may be the cause; ``alone``: it was computing
    the only one of them and nothing else."""

    worker_id: str
    step: Step
    task_ids: tuple[TaskId, ...]
    alone: bool

    def apply(self, s: State) -> None:
        for task_id in self.task_ids:
            blame = s.steps.suspects.get(task_id, Blame())
            s.steps.suspects[task_id] = Blame(blame.deaths + 1, blame.alone + self.alone)


@event(wakes=LEASES | {Topic.VOTE}, warns=lambda e: e.reason != DropReason.SUSPENDED)
class StepAborted(Event):
    """The attempt at the step is over: no member is left, a group leaves, or the run stops."""

    step: Step
    reason: str
    rejected: str = ""  # Reason why a group leaves the step; empty if none does
    kept: bool = False
    """Its other groups stay reserved for the step, which opens again with the settings that it had.
    Otherwise they are ready again."""

    def apply(self, s: State) -> None:
        step = s.steps.open
        if step is None or step.step != self.step:  # a lost step that will not be trained again
            s.tasks.move_all(s.steps.replay.pop(self.step), TaskState.READY)
            s.steps.settings.pop(self.step, None)
            return
        s.steps.open = None
        if self.rejected:
            s.steps.rejections += 1
            s.steps.last_rejection = self.rejected
        if step.replay or self.kept:
            # It opens again with the same groups and settings.
            s.steps.replay[step.step] = step.groups
            s.steps.settings[step.step] = step.settings
        else:
            s.tasks.move_all(step.groups, TaskState.READY)

    def text(self) -> str:
        if self.reason == DropReason.SUSPENDED:
            return f"step {self.step} left: its groups are kept for the run to go on"
        return f"step {self.step} aborted: {self.reason.replace('_', ' ')}"


@event(
    wakes=LEASES,
    severity=Severity.WARNING,
    words="run rolled back from step {0.from_step} to step {0.step}: no replica holds the "
    "newest state",
)
class RolledBack(Event):
    """No living replica holds the newest state: the run is after ``step`` again, as ``version``."""

    step: Step
    version: Version
    from_step: Step
    from_version: Version
    checkpoint_path: str

    def apply(self, s: State) -> None:
        s.versions.roll_back(self.step, self.version)
        # The lost groups are kept for the same steps again.
        s.tasks.move_all(s.steps.roll_back(self.step), TaskState.IN_STEP)


@event(words="checkpoint of step {0.step}: {0.path}")
class CheckpointRecorded(Event):
    worker_id: str
    step: Step
    version: Version
    path: str
    size_bytes: int
    seconds: float
    digest: str = ""

    def apply(self, s: State) -> None:
        s.versions.record(
            Checkpoint(self.step, self.version, self.path, self.digest, self.worker_id)
        )
        s.cover(s.versions.agreed.step)


@event(
    severity=Severity.WARNING,
    words="checkpoint of step {0.step} is void ({0.path}): the other replicas' weights differ "
    "from those that {0.worker_id} wrote",
)
class CheckpointVoided(Event):
    """The replica that wrote a checkpoint was outvoted about its weights: it is never restored."""

    worker_id: str
    step: Step
    version: Version
    path: str

    def apply(self, s: State) -> None:
        s.versions.void(self.path)
        s.evals.disown(self.step, self.version)


@event(directs=False)
class BestCheckpointChosen(Event):
    """The checkpoint with the highest held-out reward so far: it is kept as long as it is the
    best."""

    step: Step
    path: str
    reward_mean: float
    is_loss: bool = False  # Recorded data: the reward is the loss with the sign changed
    metric: str = ""  # SET/METRIC; empty: the held-out reward

    def apply(self, s: State) -> None:
        s.versions.best = self.step

    def text(self) -> str:
        score = f"{self.metric or 'held-out reward'} {self.reward_mean:.3f}"
        if self.is_loss:
            score = f"held-out loss {-self.reward_mean:.4f}"
        return f"checkpoint of step {self.step} is the best so far: {score}"
