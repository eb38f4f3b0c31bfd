"""Types of the events that readers of a run tell apart: values of ``type`` in a journal and in
events.jsonl."""

from __future__ import annotations

from enum import StrEnum


class EventType(StrEnum):
    """Names of event classes of ``controller.ledger.events``, which has all of them and what each
    means."""

    BEST_CHECKPOINT_CHOSEN = "BestCheckpointChosen"
    CHECKPOINT_RECORDED = "CheckpointRecorded"
    CHECKPOINT_VOIDED = "CheckpointVoided"
    DRAINED = "Drained"
    EVAL_RECORDED = "EvalRecorded"
    EVAL_TASK_DONE = "EvalTaskDone"
    GROUP_ACCEPTED = "GroupAccepted"
    HELD_OUT_FELL = "HeldOutFell"
    MESH_FORMED = "MeshFormed"
    REWARD_HACKING_SUSPECTED = "RewardHackingSuspected"
    ROLLED_BACK = "RolledBack"
    RUN_CONTINUED = "RunContinued"
    RUN_EXTENDED = "RunExtended"
    RUN_FAILED = "RunFailed"
    RUN_FINISHED = "RunFinished"
    RUN_STARTED = "RunStarted"
    RUN_SUSPENDED = "RunSuspended"
    SCALED = "Scaled"
    SETTINGS_CHANGED = "SettingsChanged"
    STEP_ABORTED = "StepAborted"
    STEP_COMMITTED = "StepCommitted"
    STEP_OPENED = "StepOpened"
    STEP_RESHARDED = "StepResharded"
    TASK_DROPPED = "TaskDropped"
    TASK_RELEASED = "TaskReleased"
    TASKS_LEASED = "TasksLeased"
    TERM_BEGUN = "TermBegun"
    VOTE_CAST = "VoteCast"
