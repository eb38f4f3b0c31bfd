"""Lifecycle of a rollout worker: running, draining, stopped, or ended by a dead engine."""

import asyncio
import logging

from paceline.errors import UserError
from paceline.process.lifetime import ENGINE_LOST
from paceline.process.structured_log import event
from paceline.rpc.session import WorkerSession
from paceline.v1 import worker_pb2
from rollout_worker.engine.base import EngineError
from rollout_worker.held_tasks import HeldTasks, Stage
from rollout_worker.tasks.task_runner import TaskRunner

log = logging.getLogger(__name__)

PARTIAL_S = 1.0
"""A stopping worker tries for this long to store its unfinished completions for other workers."""
HAND_BACK_S = 2.0  # A stopping worker tries for this long to hand its tasks back


class EngineFailed(UserError):
    """The engine stopped working in the middle of the run."""


class EngineLost(EngineFailed):
    """The engine died while it generated: one of the prompts may have been the reason."""

    exit_status = ENGINE_LOST


class WorkerLifecycle:
    """``drain_s``: a draining worker works on its tasks for this long, then hands the rest back.

    ``leaving``: no new tasks are taken. ``ended``: the worker's loops stop."""

    def __init__(self, held: HeldTasks, drain_s: float) -> None:
        self._held = held
        self._drain_s = drain_s
        self.state: worker_pb2.Lifecycle = worker_pb2.LIFECYCLE_STARTING
        self.leaving = asyncio.Event()
        self.ended = asyncio.Event()
        self.failure: Exception | None = None

    @property
    def takes_tasks(self) -> bool:
        return not (self.leaving.is_set() or self.ended.is_set())

    def stop(self) -> None:
        self.leaving.set()
        self.ended.set()

    def fail(self, error: Exception) -> None:
        self.failure = self.failure or error
        self.stop()

    def engine_failed(self, why: object) -> None:
        """The engine can no longer follow the trainer."""
        # An engine that is being closed may well fail.
        if not self.ended.is_set():
            self.fail(EngineFailed(str(why)))

    def engine_died(self, why: EngineError) -> None:
        """The engine died. The worker reports no leave: the ledger would blame no task then."""
        if not self.ended.is_set():
            generated = bool(self._held.in_stage(Stage.GENERATING))
            self.failure = EngineLost(str(why)) if generated else EngineFailed(str(why))
            self.ended.set()

    async def drain(self, session: WorkerSession) -> None:
        """Once leaving: finishes the held tasks within fleet.drain_s, then ends the worker."""
        await self.leaving.wait()
        self.state = worker_pb2.LIFECYCLE_DRAINING
        session.poke()
        event(log, "draining", held=len(self._held))
        try:
            async with asyncio.timeout(self._drain_s):
                await self._held.until(lambda: not len(self._held))
        except TimeoutError:
            event(log, "drain takes too long, handing back", held=len(self._held))
        self.ended.set()

    async def leave(self, session: WorkerSession, tasks: TaskRunner) -> None:
        """Hands the held tasks back. Reports STOPPED, unless the engine died while it generated:
        the tasks that were in it stay held until the worker is declared dead. That is the evidence
        by which the ledger finds a prompt that kills engines.

        Unfinished completions are stored for the workers that get the tasks next."""
        lost = isinstance(self.failure, EngineLost)
        if lost:
            in_engine = [task.request_id for task in self._held.in_stage(Stage.GENERATING)]
            event(log, "engine died", logging.ERROR, tasks=len(in_engine), some=in_engine[:8])
        else:
            self.state = worker_pb2.LIFECYCLE_DRAINING
        try:
            async with asyncio.timeout(PARTIAL_S):
                await tasks.leave_partial_work(Stage.GENERATING, Stage.SCORING)
        except TimeoutError:
            event(log, "partial work not stored", logging.WARNING)
        tasks.hand_back("worker_leaving", Stage.SCORING, *([] if lost else [Stage.GENERATING]))
        kept = len(self._held.in_stage(Stage.GENERATING))
        try:
            async with asyncio.timeout(HAND_BACK_S):
                await self._held.until(lambda: len(self._held) <= kept)
        except TimeoutError:
            # The leases expire with the worker.
            event(log, "left without handing back", logging.WARNING, held=len(self._held))
        if not lost:
            self.state = worker_pb2.LIFECYCLE_STOPPED
            await session.close()
            event(log, "stopped")
