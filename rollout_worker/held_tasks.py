"""The tasks that this worker holds, and the settings of their leases. Every report names the tasks,
so that no lease expires by oversight. A task is held from the moment the lease reply is read until
the controller has acknowledged its group or its return, or has given it to another worker."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from paceline.config.schema import Config
from paceline.config.sections.evaluation import EvalSetConfig
from paceline.payloads.group_limits import task_settings
from paceline.v1 import common_pb2, rollout_pb2
from rollout_worker.engine.base import Completion, Request, SamplingParams


class Stage(StrEnum):
    GENERATING = "generating"  # Its prompt is tokenised or its sequences are in the engine
    SCORING = "scoring"
    FINISHED = "finished"  # Its group, or its return, waits for the controller's acknowledgement


@dataclass(slots=True)
class HeldTask:
    lease: rollout_pb2.Lease
    stage: Stage = Stage.GENERATING
    since: float = field(default_factory=time.monotonic)
    work: asyncio.Task[None] | None = None
    request: Request | None = None  # The engine request, if another worker can continue it
    completions: tuple[Completion, ...] = ()  # The request's result, while it is scored
    unfinished: int = field(init=False)  # Completions that are not complete

    def __post_init__(self) -> None:
        self.unfinished = self.lease.group_size

    @property
    def request_id(self) -> str:
        return request_id_of(self.lease.task)


def request_id_of(task: common_pb2.TaskRef) -> str:
    """One attempt at a task, as the engine, the outbox and the log name it."""
    return f"{task.task_id}/{task.attempt}"


class HeldTasks:
    def __init__(self) -> None:
        self._tasks: dict[str, HeldTask] = {}  # By request id
        self._released = asyncio.Event()
        self.room = asyncio.Event()
        """Set when there may be room for more tasks; the lease loop waits for it and clears it."""

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[HeldTask]:
        return iter(list(self._tasks.values()))

    def add(self, lease: rollout_pb2.Lease) -> HeldTask | None:
        """None if it is held already: a lease reply was repeated."""
        task = HeldTask(lease)
        return task if self._tasks.setdefault(task.request_id, task) is task else None

    def evaluating(self) -> bool:
        """True while the engine generates for an evaluation. Any thread may ask."""
        return any(t.stage is Stage.GENERATING and is_evaluation(t.lease) for t in self)

    def find(self, request_id: str) -> HeldTask | None:
        return self._tasks.get(request_id)

    def release(self, task: common_pb2.TaskRef) -> None:
        self._tasks.pop(request_id_of(task), None)
        self._released.set()
        self.room.set()

    def in_stage(self, *stages: Stage) -> list[HeldTask]:
        return [task for task in self._tasks.values() if task.stage in stages]

    def unfinished(self) -> int:
        """Completions that the engine or an environment is still making. Counted one by one: the
        short ones of a group free their slots long before the longest."""
        return sum(task.unfinished for task in self.in_stage(Stage.GENERATING))

    def completion_finished(self, request_id: str) -> None:
        """Its slot is free, however long the rest of its group takes. Ignores unknown ids."""
        task = self.find(request_id)
        if task is not None and task.unfinished:
            task.unfinished -= 1
        self.room.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for a state that releases of tasks lead to."""
        while not condition():
            self._released.clear()
            await self._released.wait()


def is_evaluation(lease: rollout_pb2.Lease) -> bool:
    return lease.kind == rollout_pb2.TASK_KIND_EVAL


def eval_set_of(lease: rollout_pb2.Lease, config: Config) -> EvalSetConfig | None:
    """The named set of an evaluation; None for that of data.eval_path, and for training tasks."""
    return config.evaluation.sets.get(lease.eval_set) if lease.eval_set else None


def answer_of(row: Mapping[str, Any], config: Config) -> Any:
    return row.get(config.data.answer_field) if config.data.answer_field else None


def settings_of(lease: rollout_pb2.Lease, config: Config) -> rollout_pb2.TaskSettings:
    """Settings of the task, as its lease has them: they may change during a run."""
    return lease.settings if lease.HasField("settings") else task_settings(config)


def sampling_params(config: Config, lease: rollout_pb2.Lease) -> SamplingParams:
    settings, rollout = settings_of(lease, config), config.rollout
    of = eval_set_of(lease, config)
    return SamplingParams(
        max_tokens=settings.max_tokens,
        temperature=(of and of.temperature) or rollout.temperature,
        top_p=(of and of.top_p) or settings.top_p,
        top_k=settings.top_k,
        stop=tuple(rollout.stop),
        seed=lease.seed,
        greedy=is_evaluation(lease) if of is None else of.is_greedy,
    )


def returned(
    task: common_pb2.TaskRef,
    reason: str,
    detail: str = "",
    kind: rollout_pb2.ReturnKind = rollout_pb2.RETURN_KIND_FAILED,
) -> rollout_pb2.ReturnedTask:
    # What a user's code raises may hold text that has no encoding.
    detail = detail[:1000].encode(errors="backslashreplace").decode()
    return rollout_pb2.ReturnedTask(task=task, kind=kind, reason=reason, detail=detail)
