"""Task runner: start, cancellation, return and hand-over of held tasks.

lease ──► take ──► producer (prompt ─► engine ─► rewards) ──► outbox ──► verdict: released
             └──► handed back, if this worker is not to work on it
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from paceline.errors import one_line
from paceline.rpc.session import WorkerSession
from paceline.v1 import common_pb2, rollout_pb2
from rollout_worker.engine.base import Aborted, Engine, EngineError
from rollout_worker.held_tasks import HeldTask, HeldTasks, Stage, request_id_of, returned
from rollout_worker.tasks.outbox import Outbox
from rollout_worker.tasks.partial_rollouts import PartialRollouts

log = logging.getLogger(__name__)


Produce = Callable[[HeldTask], Awaitable[rollout_pb2.Group | rollout_pb2.ReturnedTask]]
"""Makes a lease's group, or says why there is none. Raises Aborted if the request was aborted,
EngineError if the engine has failed."""


@dataclass
class TaskRunner:
    """``engine_died``: called if the engine fails while it works on a task. ``unwanted``: why this
    worker hands back what it leases; empty: it works on it."""

    session: WorkerSession
    held: HeldTasks
    engine: Engine
    produce: Produce
    partials: PartialRollouts
    engine_died: Callable[[EngineError], None]
    unwanted: Callable[[], str]

    def __post_init__(self) -> None:
        self.outbox = Outbox(self.session, self.held)

    def take(self, lease: rollout_pb2.Lease) -> None:
        task = self.held.add(lease)
        if task is None:
            return
        if why := self.unwanted():
            self._hand_back(task, why)
        else:
            task.work = asyncio.create_task(self._produce(task))

    async def _produce(self, task: HeldTask) -> None:
        try:
            outcome = await self.produce(task)
        except Aborted as aborted:
            if task.request is not None:
                self.partials.note(task.request, aborted.partial, last=True)
            return
        except EngineError as error:
            self.engine_died(error)
            return
        except BaseException as error:
            working = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and working and working.cancelling():
                raise
            # Otherwise what one task meets, in our code or a user's, would keep it held for ever.
            log.exception("task failed task=%s", task.request_id)
            outcome = returned(task.lease.task, "worker_error", one_line(error))
        task.stage = Stage.FINISHED
        self.outbox.put(outcome)
        self.held.room.set()

    def _hand_back(self, task: HeldTask, reason: str) -> None:
        task.stage = Stage.FINISHED
        kind = rollout_pb2.RETURN_KIND_HAND_BACK
        self.outbox.put(returned(task.lease.task, reason, kind=kind))

    def drop(self, task: HeldTask) -> None:
        self.engine.abort(task.request_id)
        if task.work is not None:
            task.work.cancel()

    def cancel(self, ref: common_pb2.TaskRef) -> bool:
        """The controller has taken the task away. False if it is not held."""
        if (task := self.held.find(request_id_of(ref))) is None:
            return False
        self.drop(task)
        self.outbox.withdraw(ref)
        self.held.release(ref)
        return True

    def drop_all(self) -> None:
        """Drops everything: the incarnation is over, and its tasks belong to others by now."""
        for task in self.held:
            self.drop(task)
            self.held.release(task.lease.task)
        self.outbox.clear()
        self.partials.clear()

    def hand_back(self, reason: str, *stages: Stage) -> None:
        """Stops and hands back the tasks in these stages."""
        for task in self.held.in_stage(*stages):
            self.drop(task)
            self._hand_back(task, reason)

    async def leave_partial_work(self) -> None:
        """Stores the unfinished completions, for the workers that get these tasks next."""
        aborted = []
        for task in self.held:
            if task.request is None or task.stage is Stage.FINISHED:
                continue
            if task.stage is Stage.SCORING:
                self.partials.note(task.request, task.completions, last=True)
            elif task.work is not None:
                aborted.append(task.work)
                self.engine.abort(task.request_id)
        if aborted:
            await asyncio.wait(aborted)
        await self.partials.flush()
