"""Views of a group: its step, its staleness, its place in the data set."""

from collections.abc import Collection
from dataclasses import dataclass
from math import fsum

from controller.ledger.specs import GroupMeta
from controller.ledger.state.state import State
from controller.ledger.state.tasks import Task
from paceline.ids import Step, TaskId


def step_of_task(state: State) -> dict[TaskId, Step]:
    """Task id to the step that trains it, for tasks in or past a step."""
    book = state.steps
    found = {task_id: step for step, ids in book.history.items() for task_id in ids}
    found.update({task_id: step for step, ids in book.replay.items() for task_id in ids})
    if book.open is not None:
        found.update(dict.fromkeys(book.open.groups, book.open.step))
    return found


def staleness_of(state: State, task: Task, step: int) -> int:
    """Staleness of the group's oldest token at ``step``; 0: at the next step to open."""
    if task.group is None:
        return 0
    opened = 1 if state.steps.open is not None else 0
    at = step or state.versions.step + 1 + opened
    return state.versions.staleness(task.group.min_version, Step(at))


def place_of(state: State, task_id: str) -> tuple[int, int]:
    """(data set epoch, row) of a training task."""
    return state.run.order.place(int(task_id[1:]))


@dataclass(frozen=True, slots=True)
class RewardTotals:
    samples: int
    total: float
    squares: float  # Of each reward's difference from the mean of all
    within: float  # Of each reward's difference from the mean of its group, squared


def reward_totals(groups: Collection[GroupMeta]) -> RewardTotals:
    """The same bits in whatever order the groups are."""
    samples = sum(g.sequences for g in groups)
    total = fsum(g.sequences * g.reward_mean for g in groups)
    mean = total / max(samples, 1)
    within = fsum((g.sequences - 1) * g.reward_std**2 for g in groups)
    between = fsum(g.sequences * (g.reward_mean - mean) ** 2 for g in groups)
    return RewardTotals(samples, total, within + between, within)
