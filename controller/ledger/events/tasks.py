"""Events of tasks: leases, groups, drops, evaluation rounds."""

from __future__ import annotations

from controller.ledger.enums import ROUTINE_DROPS, VerdictCode
from controller.ledger.events.event import Event, Severity, Topic, event, reason_in_words
from controller.ledger.facts import GroupFacts, LeasedTask
from paceline.ids import Step, TaskId, Version

_LEASES = frozenset({Topic.LEASE, Topic.ISOLATED})


@event
class TasksLeased(Event):
    """The reply to ``lease_seq``: a retry gets it again."""

    worker_id: str
    incarnation: int
    lease_seq: int
    leases: tuple[LeasedTask, ...]

    directs = False
    listed = False

    def text(self) -> str:
        return f"{self.worker_id} leased {len(self.leases)} tasks"


@event
class GroupAccepted(Event):
    """The training group is ready; its payload is stored under (task_id, attempt)."""

    worker_id: str
    group: GroupFacts

    wakes = frozenset({Topic.ISOLATED})
    directs = False
    listed = False

    def text(self) -> str:
        return f"group of task {self.group.task_id} accepted from {self.worker_id}"


@event
class TaskReleased(Event):
    """The lease is over; the task goes back to the front of the queue."""

    task_id: TaskId
    attempt: int
    worker_id: str
    reason: str
    """A ReleaseReason, or the worker's reason for a failed attempt."""
    counts: bool
    """The attempt counts towards quarantine."""
    detail: str = ""
    suspected: bool = False
    """The owner died with it, and it may have been the cause."""

    wakes = _LEASES
    listed = False

    def text(self) -> str:
        why = reason_in_words(self.reason, self.detail)
        return f"task {self.task_id} taken back from {self.worker_id} ({why})"


@event
class TaskDropped(Event):
    """The task is finished without being trained, for good. Another task takes its place."""

    task_id: TaskId
    attempt: int
    reason: str
    """A DropReason, or the worker's own reason."""
    detail: str = ""
    verdict: VerdictCode = VerdictCode.DUPLICATE
    """On a repeated submission of this attempt."""

    wakes = _LEASES

    @property
    def listed(self) -> bool:
        return self.reason not in ROUTINE_DROPS

    severity = Severity.WARNING

    def text(self) -> str:
        return f"task {self.task_id} dropped ({reason_in_words(self.reason, self.detail)})"


@event
class EvalScheduled(Event):
    step: Step
    version: Version
    rows: int

    wakes = _LEASES

    def text(self) -> str:
        return f"evaluation after step {self.step} over {self.rows} prompts"


@event
class EvalTaskDone(Event):
    task_id: TaskId
    attempt: int
    worker_id: str
    reward_mean: float

    wakes = frozenset({Topic.ISOLATED})
    directs = False
    listed = False

    def text(self) -> str:
        return f"evaluation prompt {self.task_id} scored, reward {self.reward_mean:.3f}"


@event
class EvalRecorded(Event):
    step: Step
    version: Version
    reward_mean: float | None
    """None if every row failed: that is no reward of 0."""
    count: int
    """Rows that were scored."""

    def text(self) -> str:
        if self.reward_mean is None:
            return f"evaluation after step {self.step}: no prompt could be scored"
        shown = f"reward {self.reward_mean:.3f} over {self.count} prompts"
        return f"evaluation after step {self.step}: {shown}"
