"""Vocabulary of events: their types, their severity, and the evidence and causes of faults. The
ledger journals these words; readers of the journal and of the run files tell events apart by
them."""

from enum import StrEnum

DOCUMENTED = {"use_attribute_docstrings": True}
"""``__pydantic_config__`` of the classes that the REST interface publishes."""


class EventType(StrEnum):
    """Every kind of event. The ledger has a class of each name, which says what the event means."""

    BEST_CHECKPOINT_CHOSEN = "BestCheckpointChosen"
    BOUNDS_SET = "BoundsSet"
    CHECKPOINT_RECORDED = "CheckpointRecorded"
    CHECKPOINT_REQUESTED = "CheckpointRequested"
    CHECKPOINT_VOIDED = "CheckpointVoided"
    DRAINED = "Drained"
    EVAL_RECORDED = "EvalRecorded"
    EVAL_SCHEDULED = "EvalScheduled"
    EVAL_TASK_DONE = "EvalTaskDone"
    FAULT_EXPLAINED = "FaultExplained"
    GROUP_ACCEPTED = "GroupAccepted"
    GROUP_LOST = "GroupLost"
    GROUP_TRIED = "GroupTried"
    GROUPS_BLAMED = "GroupsBlamed"
    HOST_ALLOWED = "HostAllowed"
    HOST_BLOCKED = "HostBlocked"
    HOST_KEPT = "HostKept"
    LINK_ASSIGNED = "LinkAssigned"
    MESH_BROKEN = "MeshBroken"
    MESH_FORMED = "MeshFormed"
    ORIGINS_DIFFER = "OriginsDiffer"
    PARITY_FAILED = "ParityFailed"
    PAUSED = "Paused"
    PROCESS_FAULT = "ProcessFault"
    ROLLED_BACK = "RolledBack"
    RUN_CONTINUED = "RunContinued"
    RUN_EXTENDED = "RunExtended"
    RUN_FAILED = "RunFailed"
    RUN_FINISHED = "RunFinished"
    RUN_STARTED = "RunStarted"
    RUN_SUSPENDED = "RunSuspended"
    SCALED = "Scaled"
    SEAT_ASKED = "SeatAsked"
    SEAT_GRANTED = "SeatGranted"
    SEAT_LENT = "SeatLent"
    SEAT_RETURNED = "SeatReturned"
    SEATS_CERTAIN = "SeatsCertain"
    SETTINGS_CHANGED = "SettingsChanged"
    SPARE_SET = "SpareSet"
    STEP_ABORTED = "StepAborted"
    STEP_COMMITTED = "StepCommitted"
    STEP_OPENED = "StepOpened"
    STEP_RESHARDED = "StepResharded"
    STOP_REQUESTED = "StopRequested"
    SUSPEND_REQUESTED = "SuspendRequested"
    TASK_DROPPED = "TaskDropped"
    TASK_RELEASED = "TaskReleased"
    TASKS_LEASED = "TasksLeased"
    TERM_BEGUN = "TermBegun"
    TRAINING_SEATS_SET = "TrainingSeatsSet"
    TURN_CHANGED = "TurnChanged"
    VOTE_CAST = "VoteCast"
    WEIGHTS_NOT_LOADED = "WeightsNotLoaded"
    WEIGHTS_STORED = "WeightsStored"
    WEIGHTS_WITHDRAWN = "WeightsWithdrawn"
    WORKER_CHANGED = "WorkerChanged"
    WORKER_DIED = "WorkerDied"
    WORKER_REGISTERED = "WorkerRegistered"


AT_EVERY_STEP = (EventType.STEP_COMMITTED, EventType.TURN_CHANGED)
"""Events of severity routine: lists for people leave them out."""


class Severity(StrEnum):
    """Severity of an event, of a diagnosis, or of an alert."""

    ROUTINE = "routine"  # happens at every step
    INFO = "info"  # the run goes on as planned
    WARNING = "warning"  # something was lost, is slow or has to be repeated, and the run goes on
    ERROR = "error"  # the run has failed, or stands still

    @property
    def is_fault(self) -> bool:
        return self in (Severity.WARNING, Severity.ERROR)


class DeathCause(StrEnum):
    """Evidence on which a worker was declared dead."""

    EXIT = "exit"  # its launcher saw the process end
    LEASE = "lease"  # no report for longer than its lease
    SUSPECT = "suspect"  # its session broke, and a peer's collective with it failed
    WEDGED = "wedged"  # its main loop made no progress for too long
    REPLACED = "replaced"  # a new process registered under the same name


class MeshEnd(StrEnum):
    """Reason for which a mesh epoch ended."""

    PEER_ERROR = "peer_error"  # a member reported a failed collective
    MEMBER_DIED = "member_died"  # a member left the fleet
    DIVERGED = "diverged"  # the members' weights were not equal
    LOST_COMMIT = "lost_commit"  # a member has what Redis lost with the end of the journal
    MEMBERSHIP = "membership"  # a replica joins or leaves between two steps
    GROUP_LEFT_OUT = "group_left_out"  # a group left the step: the gradients start over


class FaultCause(StrEnum):
    """Cause of a fault, as far as the evidence goes. Later evidence may change it."""

    KILLED = "killed"  # by a signal that no launcher of the run has sent
    OUT_OF_MEMORY = "out_of_memory"  # killed by the kernel for lack of memory
    CRASHED = "crashed"  # by a signal of its own fault, such as SIGSEGV
    ERROR = "error"  # it exited by itself, with an error
    STOPPED = "stopped"  # it did not run: SIGSTOP, a debugger, a freezer
    HOST_LOST = "host_lost"  # all workers of its host went silent at once
    NETWORK_PARTITION = "network_partition"  # it could not be reached, and came back
    WEDGED = "wedged"  # its main loop made no progress
    COLLECTIVE_ERROR = "collective_error"  # a peer's collective with it failed
    ASKED_TO_LEAVE = "asked_to_leave"
    REPLACED = "replaced"  # another process has taken its name
    HEARTBEAT_SILENCE = "heartbeat_silence"  # a symptom: nothing more is known
    UNATTRIBUTED = "unattributed"
    LATE = "late"  # a leader that lost its lease, in the journals of earlier releases: never made


ATTRIBUTED = frozenset(FaultCause) - {FaultCause.HEARTBEAT_SILENCE, FaultCause.UNATTRIBUTED}
"""A symptom counts as no cause."""
NO_FAULT = frozenset({FaultCause.ASKED_TO_LEAVE, FaultCause.REPLACED})
OF_HOST = frozenset(FaultCause) - NO_FAULT - {FaultCause.KILLED, FaultCause.UNATTRIBUTED}
"""Causes that speak against a worker's host. A process that is killed by a signal was killed by
somebody; silence of a worker and of its launcher is the host's."""
