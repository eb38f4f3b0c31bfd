"""Vocabulary of the ledger: the closed sets of words in its commands, events and state."""

from enum import StrEnum


class Role(StrEnum):
    POLICY = "policy"  # trains: it is a member of the gradient mesh and sends weights
    ROLLOUT = "rollout"  # leases tasks, receives weights over a link of its own, may stand by
    SCORER = "scorer"  # rollout workers call it, at the address that it registers with

    @property
    def words(self) -> str:
        """For users: "policy replica"."""
        return {Role.POLICY: "policy replica", Role.ROLLOUT: "rollout worker"}.get(self, "scorer")

    @property
    def side(self) -> "Role":
        """The side that it is on where devices are shared: scorers work for generation."""
        return Role.ROLLOUT if self is Role.SCORER else self


class Phase(StrEnum):
    NONE = "none"  # no run yet
    OPEN = "open"  # tasks are leased and steps open
    SUSPENDING = "suspending"  # asked to stop for now: no new step, no new lease
    SUSPENDED = "suspended"  # stopped for now: its workers leave, and a later fleet goes on
    STOPPING = "stopping"  # asked to end: no new step, no new lease
    FINISHED = "finished"  # ended as planned or as asked
    FAILED = "failed"  # ended because it could not go on


_ENDING = frozenset({Phase.STOPPING, Phase.FINISHED, Phase.FAILED})
PHASE_TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.NONE: frozenset({Phase.OPEN}),
    Phase.OPEN: frozenset({Phase.SUSPENDING}) | _ENDING,
    Phase.SUSPENDING: frozenset({Phase.OPEN, Phase.SUSPENDED}) | _ENDING,
    Phase.SUSPENDED: frozenset({Phase.OPEN}) | _ENDING,
    Phase.STOPPING: _ENDING,
    Phase.FINISHED: frozenset({Phase.OPEN}),  # with more steps than before
    Phase.FAILED: frozenset(),
}


class SuspendStage(StrEnum):
    """Work that a run still does before its workers leave. A later request shortens it."""

    FINISH_STEP = "finish_step"  # commit the open step, then write a checkpoint
    LEAVE_STEP = "leave_step"  # give the open step up, then write a checkpoint
    AT_ONCE = "at_once"  # neither


class Kind(StrEnum):
    TRAIN = "train"  # a group of completions that a step trains
    EVAL = "eval"  # one greedy completion of a held-out prompt, scored and never trained


class Lifecycle(StrEnum):
    """Stage of a worker's process. It only moves forward, see ``LIFECYCLE_TRANSITIONS``."""

    STARTING = "starting"  # the process is up, its main loop is not yet ready for work
    RUNNING = "running"  # ready for work
    DRAINING = "draining"  # finishes what it holds, takes nothing new
    STOPPED = "stopped"  # has left by itself; holds nothing
    DEAD = "dead"  # declared dead by evidence; its tasks have gone to other workers


_GONE = frozenset({Lifecycle.STOPPED, Lifecycle.DEAD})
LIFECYCLE_TRANSITIONS: dict[Lifecycle, frozenset[Lifecycle]] = {
    Lifecycle.STARTING: frozenset({Lifecycle.RUNNING, Lifecycle.DRAINING}) | _GONE,
    Lifecycle.RUNNING: frozenset({Lifecycle.DRAINING}) | _GONE,
    Lifecycle.DRAINING: _GONE,
    Lifecycle.STOPPED: frozenset(),
    Lifecycle.DEAD: frozenset(),
}


class VoteOutcome(StrEnum):
    COMMITTED = "committed"  # apply the reduced gradients
    RETRY = "retry"  # the epoch ended first: keep local gradients, discard the reduced ones
    PENDING = "pending"  # votes are still missing


class EmptyReason(StrEnum):
    UNSPECIFIED = ""  # tasks were leased
    STALENESS = "staleness"  # enough groups are in flight for the allowed staleness
    WEIGHTS = "weights"  # the worker's weights are too old to start a task
    PAUSED = "paused"  # the run is paused
    STOPPED = "stopped"  # the worker drains, or the run has ended
    ISOLATED = "isolated"  # the worker holds a suspect task, or runs empty to take one
    SPARE = "spare"  # the worker stands by
    PARKED = "parked"  # the worker does not hold its seat
    BLOCKED = "blocked"  # its host gets no new work


class VerdictCode(StrEnum):
    ACCEPTED = "accepted"  # counted now
    DUPLICATE = "duplicate"  # the same attempt was accepted before
    SUPERSEDED = "superseded"  # the lease is over: the task went on without this attempt
    UNKNOWN_TASK = "unknown_task"  # this task, or this attempt at it, was never leased
    TOO_STALE = "too_stale"  # too old for any step to come: the task is dropped
    INVALID = "invalid"  # the group contradicts itself or the run


class ReturnKind(StrEnum):
    HAND_BACK = "hand_back"  # no fault: does not count towards quarantine
    FAILED = "failed"  # the attempt failed: counts towards quarantine
    DROP = "drop"  # the task can never succeed


class ReleaseReason(StrEnum):
    """Reason for which a lease ended; a failed attempt has the worker's own reason instead."""

    OWNER_DIED = "owner_died"
    OWNER_STOPPED = "owner_stopped"
    LEASE_EXPIRED = "lease_expired"  # the owner's reports did not name it
    HAND_BACK = "hand_back"


class DropReason(StrEnum):
    """Reason for which a task is never trained; the worker may have one of its own instead."""

    STALE = "stale"  # older than max_staleness, in a run that drops late groups
    EXPIRED = "expired"  # no token of the group was within max_token_age
    UNINFORMATIVE = "uninformative"  # all rewards of the group are equal
    QUARANTINED = "quarantined"  # max_attempts attempts failed, or killed their owners
    RUN_ENDED = "run_ended"  # the run ended first
    SUSPENDED = "suspended"  # of a step: the run was stopped for now


class GroupFault(StrEnum):
    """Reason for which an accepted group leaves its step."""

    PAYLOAD_LOST = "payload_lost"  # the payload store has no readable payload of it
    PAYLOAD_INVALID = "payload_invalid"  # the payload contradicts itself or the accepted metadata
    OUT_OF_MEMORY = "out_of_memory"  # a row of it alone does not fit into the trainer's memory
    KILLED_TRAINERS = "killed_trainers"  # max_attempts trainers died with it


DROPPED_FOR_AGE = (DropReason.STALE, DropReason.EXPIRED)
ROUTINE_DROPS = frozenset({*DROPPED_FOR_AGE, DropReason.UNINFORMATIVE, DropReason.RUN_ENDED})
"""Drops of normal operation: they are counted and not listed."""
