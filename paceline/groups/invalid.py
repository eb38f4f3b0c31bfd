"""Refusal of malformed messages, and the checks of fields that several messages have.

An error names the field, its fault, and the values that are allowed.
"""

from __future__ import annotations

import re

from paceline.ids import TaskId
from paceline.v1 import common_pb2

TASK_ID = re.compile(r"t\d{1,15}|e\d{1,9}\.\d{1,9}")


class Invalid(ValueError):
    """The request, or one group in it, is malformed. Nothing has changed."""


def check_task(task: common_pb2.TaskRef) -> tuple[TaskId, int]:
    if not TASK_ID.fullmatch(task.task_id):
        raise Invalid(f"task.task_id {task.task_id[:80]!r} is not a task id")
    if task.attempt < 1:
        raise Invalid(f"task.attempt of {task.task_id} must be 1 or more")
    return TaskId(task.task_id), task.attempt


def check_text(text: str, field: str, limit: int = 4096) -> str:
    if len(text) > limit:
        raise Invalid(f"{field} is longer than {limit} characters")
    return text


MAX_REWARD = 1e9
"""Largest magnitude of a reward and its components: sums of squares stay finite in float32."""


def usable_reward(value: float) -> bool:
    """True if ``value`` is finite and within MAX_REWARD (comparisons of a NaN are false)."""
    return abs(value) <= MAX_REWARD
