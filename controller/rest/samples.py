"""Groups to read: what the ledger knows of each, and the completions in its payload."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.message import DecodeError

from controller.ledger import views
from controller.ledger.commands import Kind
from controller.ledger.state import State
from controller.ledger.tasks import Task
from controller.rest.data_flow import staleness_of, step_of_task
from controller.rest.problem_details import Problem
from controller.store.payloads import PayloadStore
from paceline.ids import TaskId
from paceline.v1 import rollout_pb2

if TYPE_CHECKING:
    from controller.replicated_controller import Controller

MOST_TOKENS = 8192
"""Of one completion that are told one by one."""
FINISH = {rollout_pb2.FINISH_REASON_STOP: "stop", rollout_pb2.FINISH_REASON_LENGTH: "length"}

SORTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "recent": lambda g: -int(g["group_id"][1:]),
    "oldest": lambda g: int(g["group_id"][1:]),
    "reward": lambda g: g["reward_mean"],
    "-reward": lambda g: -g["reward_mean"],
    "-length": lambda g: -g["tokens"],
    "-staleness": lambda g: -g["staleness"],
}


@dataclass(frozen=True, slots=True)
class Filter:
    """What a group must fulfil; None: no matter. Tokens are of the whole group."""

    stand: str | None = None
    step: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None

    def __call__(self, group: dict[str, Any]) -> bool:
        return (
            (self.stand is None or group["stand"] == self.stand)
            and (self.step is None or group["step"] == self.step)
            and (self.min_reward is None or group["reward_mean"] >= self.min_reward)
            and (self.max_reward is None or group["reward_mean"] <= self.max_reward)
            and (self.min_tokens is None or group["tokens"] >= self.min_tokens)
            and (self.max_tokens is None or group["tokens"] <= self.max_tokens)
        )


def groups(state: State, wanted: Filter, sort: str, limit: int) -> dict[str, Any]:
    steps = step_of_task(state)
    found = [
        summary
        for task in state.tasks.records.values()
        if task.kind is Kind.TRAIN and task.group is not None
        if wanted(summary := _summary(state, task, steps.get(task.task_id, 0)))
    ]
    found.sort(key=SORTS[sort])
    return {"groups": found[:limit], "total": len(found)}


async def group(controller: Controller, group_id: str) -> dict[str, Any]:
    """One group with its completions. Raises Problem where its payload is no longer there."""
    return await read_group(controller.state, controller.payloads, group_id)


async def read_group(state: State, payloads: PayloadStore, group_id: str) -> dict[str, Any]:
    """The same from any copy of the ledger."""
    task_id = TaskId(group_id)
    ref = views.payload_ref(state, task_id)
    if ref is None:
        raise Problem(404, _why_not(state, group_id))
    task = state.tasks.records[task_id]
    summary = _summary(state, task, step_of_task(state).get(task_id, 0))
    (payload,) = await payloads.get([ref])
    if payload is None:
        raise Problem(404, f"group {group_id} has just been covered by a checkpoint: it is gone")
    try:
        message = rollout_pb2.Group.FromString(payload)
    except DecodeError:
        raise Problem(404, f"what is stored for group {group_id} cannot be read") from None
    rewards = [c.reward for c in message.completions]
    mean = math.fsum(rewards) / len(rewards) if rewards else 0.0
    spread = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards)) if rewards else 0
    return {
        **summary,
        "prompt": message.prompt_text,
        "completions": [_completion(c, mean, spread) for c in message.completions],
        "generate_s": message.generate_s,
        "reward_s": message.reward_s,
    }


def _why_not(state: State, group_id: str) -> str:
    if group_id in state.tasks.outcomes:
        return (
            f"group {group_id} is finished: samples are kept until a checkpoint covers their step, "
            "or until they are dropped"
        )
    task = state.tasks.records.get(TaskId(group_id))
    if task is not None:
        return f"group {group_id} is {task.state}: nothing has been handed in for it yet"
    return f"there is no group {group_id[:32]!r}, or it is long finished and its samples deleted"


def _summary(state: State, task: Task, step: int) -> dict[str, Any]:
    facts = task.group
    assert facts is not None
    return {
        "group_id": task.task_id,
        "attempt": facts.attempt,
        "stand": str(task.state),
        "owner": task.owner,
        "sequences": facts.sequences,
        "tokens": facts.tokens,
        "reward_mean": facts.reward_mean,
        "reward_std": facts.reward_std,
        "reward_max": facts.reward_max,
        "min_version": facts.min_version,
        "max_version": facts.max_version,
        "staleness": staleness_of(state, task, step),
        "step": step,
    }


def _completion(completion: rollout_pb2.Completion, mean: float, spread: float) -> dict[str, Any]:
    tokens = np.frombuffer(completion.tokens, "<i4")[:MOST_TOKENS]
    logprobs = np.frombuffer(completion.logprobs, "<f4")[:MOST_TOKENS]
    return {
        "text": completion.text,
        "tokens": tokens.tolist(),
        "logprobs": [round(x, 5) for x in logprobs.tolist()],
        "versions": [(span.version, span.length) for span in completion.versions],
        "finish_reason": FINISH.get(completion.finish_reason, "unknown"),
        "reward": completion.reward,
        "reward_components": dict(completion.reward_components),
        "advantage": (completion.reward - mean) / spread if spread > 0 else 0.0,
    }
