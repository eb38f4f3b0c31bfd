"""Groups of samples: the ledger's facts of each, and the completions in its payload."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from google.protobuf.message import DecodeError

from controller.ledger.commands import Kind
from controller.ledger.state.state import State
from controller.ledger.views import views
from controller.ledger.views.group_views import step_of_task
from controller.rest.problem_details import Problem
from controller.rest.replies.group_replies import FillTexts, detailed, summary_of
from controller.rest.routes.query_parameters import Reward, StepNumber
from controller.rest.schemas import GroupReply, GroupsReply, GroupSummary
from paceline.ids import Step, TaskId
from paceline.payloads.store import PayloadStore

SORTS: dict[str, Callable[[GroupSummary], float]] = {
    "recent": lambda g: -int(g.group_id[1:]),
    "oldest": lambda g: int(g.group_id[1:]),
    "reward": lambda g: g.reward_mean,
    "-reward": lambda g: -g.reward_mean,
    "-length": lambda g: -g.tokens,
    "-staleness": lambda g: -g.staleness,
}


@dataclass(frozen=True, slots=True)
class Filter:
    """Conditions on a group; None: any. Tokens are those of the whole group."""

    state: Literal["ready", "in_step", "trained", "dropped"] | None = None
    step: StepNumber | None = None
    min_reward: Reward | None = None
    max_reward: Reward | None = None
    min_tokens: StepNumber | None = None
    max_tokens: StepNumber | None = None
    row: StepNumber | None = None
    """Row of the data set: the groups of one prompt over epochs and attempts."""

    @property
    def by_content(self) -> bool:
        bounds = (self.min_reward, self.max_reward, self.min_tokens, self.max_tokens)
        return any(bound is not None for bound in bounds)

    def __call__(self, group: GroupSummary) -> bool:
        return (
            (self.state is None or group.state == self.state)
            and (self.step is None or group.step == self.step)
            and (self.min_reward is None or group.reward_mean >= self.min_reward)
            and (self.max_reward is None or group.reward_mean <= self.max_reward)
            and (self.min_tokens is None or group.tokens >= self.min_tokens)
            and (self.max_tokens is None or group.tokens <= self.max_tokens)
            and (self.row is None or group.dataset_row == self.row)
        )


def kept_groups(state: State) -> list[GroupSummary]:
    """The groups whose samples are kept."""
    steps = step_of_task(state)
    return [
        summary_of(state, task, task.group, steps.get(task.task_id, Step(0)))
        for task in state.tasks.records.values()
        if task.kind is Kind.TRAIN and task.group is not None
    ]


def listed(found: Iterable[GroupSummary], chosen: Filter, sort: str, limit: int) -> GroupsReply:
    """Those that fulfil ``chosen``, in order."""
    matching = sorted(filter(chosen, found), key=SORTS[sort])
    return GroupsReply(groups=matching[:limit], total=len(matching))


async def read_group(
    state: State, payloads: PayloadStore, fill_texts: FillTexts, group_id: str
) -> GroupReply:
    """One group with its completions. Raises Problem if its payload is deleted."""
    task_id = TaskId(group_id)
    ref = views.payload_ref(state, task_id)
    if ref is None:
        raise Problem(404, _why_not(state, group_id))
    task = state.tasks.records[task_id]
    assert task.group is not None
    summary = summary_of(state, task, task.group, step_of_task(state).get(task_id, Step(0)))
    (payload,) = await payloads.get([ref])
    if payload is None:
        raise Problem(404, f"a checkpoint has just covered group {group_id}: its samples are gone")
    try:
        return await asyncio.to_thread(detailed, summary, payload, fill_texts)
    except DecodeError:
        raise Problem(404, f"the stored payload of group {group_id} cannot be decoded") from None


def _why_not(state: State, group_id: str) -> str:
    if group_id in state.tasks.outcomes:
        return (
            f"group {group_id} is finished, and its samples are deleted: they are kept until a "
            "checkpoint covers their step"
        )
    task = state.tasks.records.get(TaskId(group_id))
    if task is not None:
        return f"group {group_id} is {task.state}: it has no samples yet"
    return f"there is no group {group_id[:32]!r}, or its samples were deleted long ago"
