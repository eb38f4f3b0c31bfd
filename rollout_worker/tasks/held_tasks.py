"""The tasks this worker holds: what every report names, so that no lease expires by oversight.

A task is held from the moment the lease reply is read until the controller has acknowledged its
group or its return, or has said that it is somebody else's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from paceline.v1 import common_pb2, rollout_pb2
from rollout_worker.engine.base import Completion, Request


class Stage(StrEnum):
    GENERATING = "generating"
    """Its prompt is tokenised or its sequences are in the engine."""
    SCORING = "scoring"
    FINISHED = "finished"
    """Its group, or its return, waits for the controller's acknowledgement."""


@dataclass(slots=True)
class HeldTask:
    lease: rollout_pb2.Lease
    stage: Stage = Stage.GENERATING
    since: float = field(default_factory=time.monotonic)
    work: asyncio.Task[None] | None = None
    request: Request | None = None
    """What is asked of the engine, where another worker can go on with it."""
    samples: tuple[Completion, ...] = ()
    """The request's answer, while it is scored."""
    unfinished: int = field(init=False)
    """Samples that are not all there."""

    def __post_init__(self) -> None:
        self.unfinished = self.lease.group_size

    @property
    def key(self) -> tuple[str, int]:
        return key_of(self.lease.task)

    @property
    def request_id(self) -> str:
        return f"{self.lease.task.task_id}/{self.lease.task.attempt}"


def key_of(task: common_pb2.TaskRef) -> tuple[str, int]:
    """(task id, attempt)."""
    return task.task_id, task.attempt


class HeldTasks:
    def __init__(self) -> None:
        self._tasks: dict[tuple[str, int], HeldTask] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[HeldTask]:
        return iter(list(self._tasks.values()))

    def add(self, lease: rollout_pb2.Lease) -> HeldTask | None:
        """None where it is held already: a lease reply was said twice."""
        key = key_of(lease.task)
        if key in self._tasks:
            return None
        task = self._tasks[key] = HeldTask(lease)
        return task

    def find(self, task: common_pb2.TaskRef) -> HeldTask | None:
        return self._tasks.get(key_of(task))

    def of_request(self, request_id: str) -> HeldTask | None:
        task_id, _, attempt = request_id.rpartition("/")
        return self._tasks.get((task_id, int(attempt))) if attempt.isdecimal() else None

    def release(self, task: common_pb2.TaskRef) -> None:
        self._tasks.pop(key_of(task), None)

    def refs(self) -> list[common_pb2.TaskRef]:
        return [task.lease.task for task in self._tasks.values()]

    def generating(self) -> int:
        """Samples asked of the engine or an environment and not yet all there.

        Counted one by one: the short ones of a group free their slots long before its longest.
        """
        return sum(
            task.unfinished for task in self._tasks.values() if task.stage is Stage.GENERATING
        )

    def sample_over(self, request_id: str) -> None:
        """One more sample of this task is all there. Other ids are ignored."""
        task = self.of_request(request_id)
        if task is not None and task.unfinished:
            task.unfinished -= 1

    def count(self, stage: Stage) -> int:
        return sum(task.stage is stage for task in self._tasks.values())
