"""What can be asked of the ledger, and what it answers.

A command is a wish with facts in it; ``decide`` turns it into events or refuses it. Commands carry
no clock and no I/O: the shell hands in what it saw.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Role(StrEnum):
    POLICY = "policy"
    ROLLOUT = "rollout"


class Kind(StrEnum):
    TRAIN = "train"
    EVAL = "eval"


class CommandRefused(Exception):
    """The command is not allowed in this state; nothing has changed.

    ``code`` is one of: fenced (an earlier or unknown incarnation), unknown, invalid, stopped,
    changed (what the caller saw is no longer so).
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What of the config and the data the ledger's rules depend on; fixed for the run."""

    run_id: str
    run_name: str
    seed: int
    steps: int
    groups_per_step: int
    group_size: int
    max_staleness: int
    max_attempts: int
    dataset_rows: int
    eval_rows: int
    eval_every: int
    checkpoint_every: int
    filter_uninformative: bool
    shuffle: bool
    desired: Mapping[str, int]
    """Wanted workers by role name."""
    data_digest: str = ""
    config_digest: str = ""
    bounds: Mapping[str, int] = field(default_factory=dict)
    """Least and most wanted workers: policy_min, policy_max, rollout_min, rollout_max; an absent
    one is no limit. rollout_spares: workers wanted beside those, to stand by. Not fixed: a later leader's hold from its term on."""


@dataclass(frozen=True, slots=True)
class StartRun:
    """First command of a run. Refused where the run exists with other facts."""

    facts: RunSpec


@dataclass(frozen=True, slots=True)
class BeginTerm:
    """A controller has become leader of ``term``."""

    term: int
    controller_id: str


@dataclass(frozen=True, slots=True)
class Register:
    """A process of a worker announces itself. Reply: None. Idempotent per incarnation."""

    worker_id: str
    incarnation: int
    role: Role
    host: str
    pid: int
    tensor_host: str
    ranks: int = 1
    state_version: int = -1


@dataclass(frozen=True, slots=True)
class DeclareDead:
    """Evidence says this incarnation is gone. No effect if it already is. Reply: None.

    ``how``: exit, lease, suspect, wedged or replaced.
    """

    worker_id: str
    incarnation: int
    how: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Observe:
    """The ledger's share of a worker's report. Changes that matter become events. Reply: None."""

    worker_id: str
    incarnation: int
    lifecycle: str
    """starting, running, draining or stopped."""
    state_version: int = -1
    loaded_version: int = -1


@dataclass(frozen=True, slots=True)
class LeaseTasks:
    """Reply: LeaseResult. Idempotent by ``lease_seq`` (only the newest is remembered)."""

    worker_id: str
    incarnation: int
    lease_seq: int
    max_tasks: int
    loaded_version: int


@dataclass(frozen=True, slots=True)
class LeasedTask:
    task_id: str
    attempt: int
    kind: Kind
    epoch: int
    index: int
    seed: int


@dataclass(frozen=True, slots=True)
class LeaseResult:
    leases: tuple[LeasedTask, ...]
    empty_reason: str = ""
    """staleness, weights, paused, stopped, alone or spare, where leases is empty."""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What the ledger needs to know of a group; the payload stays in the payload store."""

    task_id: str
    attempt: int
    sequences: int
    prompt_tokens: int
    """Length of the prompt, once."""
    tokens: int
    """Trainable completion tokens over all sequences."""
    min_version: int
    max_version: int
    reward_mean: float
    reward_std: float
    reward_max: float
    """Of the group's sequences."""
    generate_s: float = 0.0
    reward_s: float = 0.0
    version_sum: float = 0.0
    """Sum of versions over tokens: mean staleness in the step's metrics."""


@dataclass(frozen=True, slots=True)
class AcceptGroup:
    """Reply: Verdict. Idempotent by (task_id, attempt)."""

    worker_id: str
    incarnation: int
    group: GroupFacts


@dataclass(frozen=True, slots=True)
class Verdict:
    """``code``: accepted, duplicate, superseded, unknown_task or too_stale (or invalid, at the door)."""

    code: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class ReturnTask:
    """Reply: Verdict. ``kind``: hand_back, failed or drop."""

    worker_id: str
    incarnation: int
    task_id: str
    attempt: int
    kind: str
    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ExpireLease:
    """The owner no longer names this lease. No effect where the task moved on. Reply: None."""

    task_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class BreakMesh:
    """A member reports a failed collective of ``epoch``. No effect on a later epoch. Reply: None."""

    worker_id: str
    incarnation: int
    epoch: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class FormMesh:
    """Form the next epoch from the living members of a broken one. Reply: None."""


@dataclass(frozen=True, slots=True)
class BreakLink:
    """An end reports a failed weights link: it gets a new epoch. Reply: None."""

    worker_id: str
    incarnation: int
    epoch: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class StatValue:
    sum: float
    weight: float
    max: float


@dataclass(frozen=True, slots=True)
class CastVote:
    """Reply: VoteResult. Idempotent by (step, mesh_epoch)."""

    worker_id: str
    incarnation: int
    step: int
    mesh_epoch: int
    digest: str
    stats: Mapping[str, StatValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VoteResult:
    """``outcome``: committed, retry or pending; ``version``: of the state after a commit."""

    outcome: str
    version: int = -1


@dataclass(frozen=True, slots=True)
class RecordCheckpoint:
    """Reply: tuple of obsolete paths. Idempotent by (step, version)."""

    worker_id: str
    incarnation: int
    step: int
    version: int
    path: str
    size_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Scale:
    """Reply: str, what was done. Idempotent by request_id.

    ``expected``: refused where other numbers are wanted by now; of roles not named, any.
    """

    request_id: str
    desired: Mapping[str, int]
    expected: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Drain:
    """Reply: str, what was done. Idempotent by request_id.

    Without ``replace`` one worker fewer is wanted from the same event on, so nobody starts another
    in its place. ``incarnation``: refused where another process has that name by now; 0: any.
    """

    request_id: str
    worker_id: str
    replace: bool = False
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class Pause:
    request_id: str
    paused: bool


@dataclass(frozen=True, slots=True)
class RequestCheckpoint:
    """A checkpoint beside the regular ones, as soon as a step allows. Reply: str."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End the run early, after the open step. ``failed``: because something cannot go on."""

    request_id: str
    reason: str
    failed: bool = False


Command = (
    StartRun
    | BeginTerm
    | Register
    | DeclareDead
    | Observe
    | LeaseTasks
    | AcceptGroup
    | ReturnTask
    | ExpireLease
    | BreakMesh
    | FormMesh
    | BreakLink
    | CastVote
    | RecordCheckpoint
    | Scale
    | Drain
    | Pause
    | RequestCheckpoint
    | Stop
)
