"""Commands to the ledger, and its replies. ``decide`` turns a command into events or refuses it.
Commands carry no clock and no I/O: the shell hands in what it saw."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from controller.ledger.enums import (
    EmptyReason,
    GroupFault,
    Lifecycle,
    ReturnKind,
    SuspendStage,
    VerdictCode,
    VoteOutcome,
)
from controller.ledger.enums import Kind as Kind
from controller.ledger.enums import Role as Role
from controller.ledger.specs import Ballot, WorkerSpec
from controller.ledger.specs import GroupMeta as GroupMeta
from controller.ledger.specs import LeasedTask as LeasedTask
from controller.ledger.specs import LiveSpec as LiveSpec
from controller.ledger.specs import RunSpec as RunSpec
from controller.ledger.specs import StatValue as StatValue
from paceline.errors import RefusalCode
from paceline.ids import MeshEpoch, Step, TaskId, Version
from paceline.observe.vocabulary import DeathCause, FaultCause


class CommandRefused(Exception):
    """The command is not allowed in this state; nothing has changed."""

    def __init__(self, code: RefusalCode, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Command:
    """Anything that can be asked of the ledger."""


@dataclass(frozen=True, slots=True)
class WorkerCommand(Command):
    """A command of a worker's process: refused for any incarnation but the current one."""

    worker_id: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class AdminCommand(Command):
    """A request of a person or an autoscaler. Reply: str, the effect. Idempotent by request_id."""

    request_id: str


@dataclass(frozen=True, slots=True)
class StartRun(Command):
    """First command of a run, and of every later leader of it. Refused if the run exists with
    another spec, apart from what may change. A finished run goes on if it is given more steps."""

    spec: RunSpec  # With the settings that are in force once ``settings`` is taken over
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Changeable settings of the leader's config file, by dotted name."""


@dataclass(frozen=True, slots=True)
class BeginTerm(Command):
    term: int
    controller_id: str


@dataclass(frozen=True, slots=True)
class Register(WorkerSpec, Command):
    """A process of a worker announces itself. Reply: None. Idempotent per incarnation."""

    stalled_s: float = 0.0
    """Longest time in which the process did not run at all, since it last registered."""


@dataclass(frozen=True, slots=True)
class DeclareDead(WorkerCommand):
    """Evidence says that this incarnation is gone. No effect if it already is. Reply: None."""

    how: DeathCause
    detail: str = ""
    cause: FaultCause = FaultCause.UNATTRIBUTED
    silent_s: float = 0.0  # Since it was last heard of


@dataclass(frozen=True, slots=True)
class Observe(WorkerCommand):
    """The ledger's share of a worker's report. Changes that matter become events. Reply: None."""

    lifecycle: Lifecycle
    state_version: Version = Version(-1)
    loaded_version: Version = Version(-1)
    parity_failures: int = 0  # Failures of this incarnation so far
    parity_detail: str = ""
    load_failures: int = 0  # Failures of this incarnation so far
    load_detail: str = ""


@dataclass(frozen=True, slots=True)
class LeaseTasks(WorkerCommand):
    """Reply: LeaseResult. Idempotent by ``lease_seq`` (only the newest is remembered)."""

    lease_seq: int
    max_tasks: int
    loaded_version: Version


@dataclass(frozen=True, slots=True)
class LeaseResult:
    leases: tuple[LeasedTask, ...]
    empty_reason: EmptyReason = EmptyReason.UNSPECIFIED


@dataclass(frozen=True, slots=True)
class AcceptGroup(WorkerCommand):
    """Reply: Verdict. Idempotent by (task_id, attempt)."""

    group: GroupMeta


@dataclass(frozen=True, slots=True)
class Verdict:
    code: VerdictCode
    message: str = ""


@dataclass(frozen=True, slots=True)
class ReturnTask(WorkerCommand):
    """Reply: Verdict."""

    task_id: TaskId
    attempt: int
    kind: ReturnKind
    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ExpireLease(Command):
    """The owner no longer names this lease. No effect if the task has moved on. Reply: None."""

    task_id: TaskId
    attempt: int


@dataclass(frozen=True, slots=True)
class BreakMesh(WorkerCommand):
    """A member reports a failed collective of ``epoch``; later ones go on. Reply: None."""

    epoch: MeshEpoch
    detail: str = ""


@dataclass(frozen=True, slots=True)
class FormMesh(Command):
    """Form the next epoch from the living members of a broken one. Reply: None."""


@dataclass(frozen=True, slots=True)
class BreakLink(WorkerCommand):
    """An end reports a failed weights link: it gets a new generation. Reply: None."""

    generation: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class CastVote(Ballot, Command):
    """Reply: VoteResult. Idempotent by (step, mesh_epoch)."""


@dataclass(frozen=True, slots=True)
class VoteResult:
    outcome: VoteOutcome
    version: Version = Version(-1)  # Version of the state after a commit


@dataclass(frozen=True, slots=True)
class RecordHeldOut(WorkerCommand):
    """A replica measured the held-out rows of recorded data. Reply: None. Idempotent by step."""

    step: Step
    version: Version
    loss: float | None  # None: no row could be measured
    measured: Mapping[str, float]  # Means over the rows, by name, the loss among them
    rows: int
    left_out: int


@dataclass(frozen=True, slots=True)
class RejectGroups(WorkerCommand):
    """A trainer cannot train these groups of its shard. Reply: the number that left the step.
    Groups that have left it, or are in another member's shard, are not counted again."""

    step: Step
    groups: tuple[tuple[TaskId, int], ...]  # (task id, attempt)
    fault: GroupFault
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TryGroup(WorkerCommand):
    """The trainer computes this suspect group next, and nothing else; "": no further one. Reply:
    bool, whether the attempt at the step still stands. Idempotent."""

    step: Step
    mesh_epoch: MeshEpoch
    task_id: TaskId


@dataclass(frozen=True, slots=True)
class RecordCheckpoint(WorkerCommand):
    """Reply: CheckpointVerdict. Idempotent by (step, version)."""

    step: Step
    version: Version
    path: str
    size_bytes: int = 0
    seconds: float = 0.0
    digest: str = ""  # Digest of the weights, as in votes


@dataclass(frozen=True, slots=True)
class CheckpointVerdict:
    useless: tuple[str, ...] = ()
    """Directories that are never restored: this one if it is refused, and voided ones."""
    older: tuple[str, ...] = ()
    """Recorded checkpoints that no rollback needs any more, oldest first."""
    needed: int = 1  # Number of recorded checkpoints that a rollback may still need
    settled: Step = Step(0)  # No checkpoint of an earlier step is ever recorded any more
    recorded: tuple[str, ...] = ()  # Directories of all recorded checkpoints


@dataclass(frozen=True, slots=True)
class Scale(AdminCommand):
    desired: Mapping[str, int]
    expected: Mapping[str, int] = field(default_factory=dict)
    """Refused if the desired counts of these roles have become others."""


@dataclass(frozen=True, slots=True)
class Drain(AdminCommand):
    """Without ``replace`` the desired count falls by one with the same event."""

    worker_id: str
    replace: bool = False
    incarnation: int = 0  # Refused if another process has that name by now; 0: any


@dataclass(frozen=True, slots=True)
class RecordFault(Command):
    """A launcher saw a fault of a process that is no worker, or of one that still runs. Reply:
    None. Idempotent by request_id."""

    request_id: str
    name: str
    host: str
    pid: int
    cause: FaultCause
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RecordExit(Command):
    """A launcher saw a worker's process end. Reply: None. Idempotent by name, host and pid."""

    name: str
    host: str
    pid: int
    cause: FaultCause
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Pause(AdminCommand):
    paused: bool


@dataclass(frozen=True, slots=True)
class ChangeSettings(AdminCommand):
    settings: Mapping[str, Any]
    """Settings to change, by dotted name; the shell has validated them together with the others."""
    spec: LiveSpec  # Fields of the run's spec that follow from them


@dataclass(frozen=True, slots=True)
class RequestCheckpoint(AdminCommand):
    """A checkpoint beside the regular ones, as soon as a step allows."""


@dataclass(frozen=True, slots=True)
class Suspend(AdminCommand):
    """Stop for now: no new step and no new lease; once a checkpoint covers the last step, the
    workers leave. The run can be continued. A run that is being ended for good ends in the same
    stages."""

    stage: SuspendStage
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Continue(AdminCommand):
    """A run that was stopped for now goes on."""


@dataclass(frozen=True, slots=True)
class Stop(AdminCommand):
    """End the run early, after the open step. ``failed``: because it cannot go on."""

    reason: str
    failed: bool = False
