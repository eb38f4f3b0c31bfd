"""Versions: the states of the model that were ever committed, and the checkpoints of some.

- A version is never used twice: after a rollback the numbers go on with the newest + 1.
- ``epochs`` maps every version there ever was to its step; a rollback begins a new one.
- A checkpoint is *agreed* once all replicas have voted for the step after it: their digest of its
  weights is then known. One that an outvoted replica wrote is voided. Only an agreed checkpoint
  covers groups, so that no group is forgotten for the sake of a checkpoint that is voided later.
- ``restore_version`` is the present name of the state in the newest checkpoint (or of the initial
  model): if no worker holds anything newer, a restart needs no rollback.
"""

from dataclasses import dataclass, field

from paceline.ids import Step, Version

REMEMBERED_CHECKPOINTS = 64


@dataclass(frozen=True, slots=True)
class VersionEpoch:
    """Versions from ``first_version`` to the next epoch: state after step version - offset."""

    compact = True

    first_version: Version
    offset: int

    @property
    def first_step(self) -> Step:
        return self.step_of(self.first_version)

    def step_of(self, version: Version) -> Step:
        return Step(version - self.offset)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    compact = True

    step: Step
    version: Version
    path: str
    digest: str  # Digest of the weights in it, as in votes; empty: the initial model
    worker_id: str  # Replica that wrote it


INITIAL = Checkpoint(Step(0), Version(0), "", "", "")


@dataclass(slots=True)
class Versions:
    step: Step = Step(0)  # Committed steps that survive
    version: Version = Version(0)  # Newest committed version, the state after ``step``
    epochs: list[VersionEpoch] = field(default_factory=lambda: [VersionEpoch(Version(0), 0)])
    """Oldest first."""
    restore_version: Version = Version(0)
    checkpoints: list[Checkpoint] = field(default_factory=list)
    """Recorded and not abandoned, oldest first."""
    digests: dict[Version, str] = field(default_factory=dict)
    """Digests of weights that all members agreed on, since the newest agreed checkpoint."""
    voided: list[str] = field(default_factory=list)
    """Directories of voided checkpoints, which their writers may delete."""
    best: Step = Step(0)  # Step of the checkpoint with the highest held-out reward; 0: none
    rollbacks: int = 0
    requested: Step = Step(0)  # Step of the newest checkpoint that someone asked for; 0: none
    stored: str = ""
    """Name of the newest weights in the store of ``weights.url``; empty: none that can be read."""
    unreadable: str = ""  # Name of the newest ones there that could not be read
    unreadable_by: tuple[str, ...] = ()  # Workers that could not read some of that version

    @property
    def checkpoint(self) -> Checkpoint:
        """Start of a fleet without any living state; path "" is the initial model."""
        return self.checkpoints[-1] if self.checkpoints else INITIAL

    @property
    def agreed(self) -> Checkpoint:
        """The newest checkpoint that cannot be voided any more."""
        digests, newest_first = self.digests, reversed(self.checkpoints)
        agreed = (c for c in newest_first if c.digest in ("", digests.get(c.version)))
        return next(agreed, INITIAL)

    def step_of(self, version: Version) -> Step:
        """Step of the state ``version``, whether it survived or not."""
        for epoch in reversed(self.epochs):
            if version >= epoch.first_version:
                return epoch.step_of(version)
        return Step(0)

    def version_of(self, step: Step) -> Version:
        """Surviving version after ``step``, committed already or to come."""
        for epoch in reversed(self.epochs):
            if step >= epoch.first_step:
                return Version(step + epoch.offset)
        return Version(step)

    def survives(self, version: Version) -> bool:
        """True if ``version`` is a state that no rollback has abandoned."""
        return version <= self.version and all(
            version >= epoch.first_version or self.step_of(version) <= epoch.first_step
            for epoch in self.epochs
        )

    def staleness(self, version: Version, step: Step) -> int:
        """Age of a token of ``version`` trained in ``step``, in steps."""
        return max(0, step - 1 - self.step_of(version))

    def roll_back(self, step: Step, version: Version) -> None:
        self.step = step
        self.version = self.restore_version = version
        self.epochs.append(VersionEpoch(version, version - step))
        self.rollbacks += 1
        # The same steps, and with them the same paths, come again.
        self.voided.clear()

    def agree(self, version: Version, digest: str) -> None:
        """The replicas have voted on the weights of ``version``."""
        # The first vote counts: it may have covered groups.
        self.digests.setdefault(version, digest)
        oldest = self.agreed.version
        for known in [v for v in self.digests if v < oldest]:
            del self.digests[known]

    def record(self, checkpoint: Checkpoint) -> None:
        self.checkpoints.append(checkpoint)
        forgotten = self.checkpoints[:-REMEMBERED_CHECKPOINTS]
        self.checkpoints = self.checkpoints[-REMEMBERED_CHECKPOINTS:]
        self.checkpoints[:0] = [c for c in forgotten if c.step == self.best]
        self.restore_version = checkpoint.version
        if checkpoint.path in self.voided:
            self.voided.remove(checkpoint.path)

    def void(self, path: str) -> None:
        """The checkpoint at ``path`` is not restored any more: the one before it is the newest."""
        self.checkpoints = [k for k in self.checkpoints if k.path != path]
        self.restore_version = self.version_of(self.checkpoint.step)
        self.voided.append(path)
        if all(k.step != self.best for k in self.checkpoints):
            self.best = Step(0)
