"""What a worker does with the tasks it holds: takes, produces, drops, hands back, leaves to others.

lease ──► take ──► producer (prompt ─► engine ─► rewards) ──► outbox ──► verdict: released
             └──► handed back, where this worker is not to work on it
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from paceline.v1 import common_pb2, rollout_pb2
from rollout_worker.engine.base import Aborted, Engine, EngineError
from rollout_worker.tasks.group_producer import GroupProducer, returned
from rollout_worker.tasks.held_tasks import HeldTask, HeldTasks, Stage
from rollout_worker.tasks.outbox import Outbox
from rollout_worker.tasks.partial_rollouts import PartialReporter

log = logging.getLogger(__name__)


class TaskRunner:
    """``wake``: there may be room for more tasks. ``fail``: the engine no longer works."""

    def __init__(
        self,
        held: HeldTasks,
        engine: Engine,
        producer: GroupProducer,
        outbox: Outbox,
        partials: PartialReporter,
        *,
        wake: Callable[[], None],
        fail: Callable[[EngineError], None],
    ) -> None:
        self._held = held
        self._engine = engine
        self._producer = producer
        self._outbox = outbox
        self._partials = partials
        self._wake = wake
        self._fail = fail
        self._parted = asyncio.Event()
        """A task is no longer held."""

    def take(self, lease: rollout_pb2.Lease, unwanted: str = "") -> None:
        """``unwanted``: why this worker hands it back at once; empty: it works on it."""
        task = self._held.add(lease)
        if task is None:
            return
        if unwanted:
            self.hand_back(task, unwanted)
        else:
            task.work = asyncio.create_task(self._produce(task))

    async def _produce(self, task: HeldTask) -> None:
        try:
            outcome = await self._producer.produce(task)
        except Aborted as cut:
            if task.request is not None:
                self._partials.note(task.request, cut.partial)
            return
        except EngineError as error:
            self._fail(error)
            return
        except Exception as error:
            # A bug on the way of one task must not become a task that is held for ever.
            log.exception("task failed task=%s", task.request_id)
            outcome = returned(
                task,
                rollout_pb2.RETURN_KIND_FAILED,
                "worker_error",
                f"{type(error).__name__}: {error}",
            )
        task.stage = Stage.FINISHED
        self._outbox.put(outcome)
        self._wake()

    def hand_back(self, task: HeldTask, reason: str) -> None:
        task.stage = Stage.FINISHED
        self._outbox.put(returned(task, rollout_pb2.RETURN_KIND_HAND_BACK, reason))

    def drop(self, task: HeldTask) -> None:
        """Stops work on a task, wherever it is."""
        self._engine.abort(task.request_id)
        if task.work is not None:
            task.work.cancel()

    def cancel(self, ref: common_pb2.TaskRef) -> bool:
        """It is somebody else's, or nobody's, by now. False where it is not held."""
        if (task := self._held.find(ref)) is None:
            return False
        self.drop(task)
        self._outbox.withdraw(ref)
        self._held.release(ref)
        self.on_released()
        return True

    def forget_all(self) -> None:
        """All that was held belongs to others by now."""
        for task in self._held:
            self.drop(task)
            self._held.release(task.lease.task)
        self._outbox.clear()
        self._partials.clear()
        self.on_released()

    def give_up_unfinished(self, reason: str) -> None:
        for task in self.generating():
            self.drop(task)
            self.hand_back(task, reason)

    def hand_back_all(self, reason: str) -> None:
        """All but what is finished and waits for its verdict."""
        for task in self._held:
            if task.stage is not Stage.FINISHED:
                self.drop(task)
                self.hand_back(task, reason)

    async def leave_partial_work(self) -> None:
        """What unfinished tasks have so far is stored, for those who get them next."""
        cut = []
        for task in self._held:
            if task.request is None or task.stage is Stage.FINISHED:
                continue
            if task.stage is Stage.SCORING:
                self._partials.note(task.request, task.samples)
            elif task.work is not None:
                cut.append(task.work)
                self._engine.abort(task.request_id)
        if cut:
            await asyncio.wait(cut)
        await self._partials.flush()

    def hand_back_scoring(self, reason: str) -> None:
        for task in self._held:
            if task.stage is Stage.SCORING:
                self.drop(task)
                self.hand_back(task, reason)

    def generating(self) -> list[HeldTask]:
        """Tasks whose sequences are in the engine, or on their way to it."""
        return [task for task in self._held if task.stage is Stage.GENERATING]

    async def all_released(self) -> None:
        await self._until(lambda: not len(self._held))

    async def all_but_generating_released(self) -> None:
        await self._until(lambda: len(self.generating()) == len(self._held))

    async def _until(self, true: Callable[[], bool]) -> None:
        while not true():
            self._parted.clear()
            await self._parted.wait()

    def on_released(self) -> None:
        self._wake()
        self._parted.set()

    def on_sample_over(self, request_id: str) -> None:
        """Its slot is free, though the rest of its group may run for long."""
        self._held.sample_over(request_id)
        self._wake()
