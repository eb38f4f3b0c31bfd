"""The tail of a step: the last tasks it waits for are leased a second time, to who is idle.

    next step lacks few groups, a worker holds nothing and may be leased nothing
        └──► the task that has run longest, well beyond the typical time, gets a second try

The first try to hand in a group wins; the other lease is superseded by the same decision, and its
worker is told with its next directive. A task is counted once, however many try it.

What is left alone: a task that has failed before or that owners have died with (a second try is a
second victim), evaluation tasks (no step waits for them), and everything while weights on their way
would admit new work.
"""

from __future__ import annotations

from controller.ledger.commands import Kind
from controller.ledger.fleet import Worker
from controller.ledger.state import State
from controller.ledger.tasks import Task

_FEW = 4
"""A step's tail: at most every fourth of its groups is missing, or one."""


def awaited_tasks(state: State, worker: Worker, loaded_version: int, now: float) -> list[Task]:
    """Tasks that ``worker``, for which there is nothing else, may try a second time; the longest
    running first. ``now``: Unix seconds."""
    run = state.run
    if not run.speculative_after or worker.held:
        return []
    step = state.next_step
    if step > run.steps or step in state.steps.replay:
        return []
    if state.versions.staleness(loaded_version, step) > run.max_staleness:
        return []
    missing = run.groups_per_step - len(state.tasks.ready)
    if not 0 < missing <= max(1, run.groups_per_step // _FEW):
        return []
    started_before = now - run.speculative_after * state.tasks.typical_s
    slow = [
        task
        for holder in state.fleet.workers.values()
        for task_id in holder.held
        if _alone_and_sound(task := state.tasks.records[task_id]) and task.since <= started_before
    ]
    return sorted(slow, key=lambda task: (task.since, task.ordinal))[:missing]


def _alone_and_sound(task: Task) -> bool:
    return (
        task.kind is Kind.TRAIN and len(task.leases) == 1 and not task.failures and not task.deaths
    )
