"""Finished tasks on their way to the controller: groups to submit, tasks to return.

    put ──► queue ──► one request at a time, carrying all queued meanwhile ──► verdicts ──► release

- A task in the outbox stays held until its verdict is read. An outage of the control plane only
  delays it, and a group that is submitted twice counts once.
- After any verdict but INVALID the worker has nothing more to do with the task.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from paceline.process.structured_log import event
from paceline.rpc.client import RequestRefused
from paceline.rpc.session import WorkerSession
from paceline.v1 import common_pb2, rollout_pb2
from rollout_worker.tasks.group_encoding import first_batch
from rollout_worker.tasks.held_tasks import HeldTasks, key_of

logger = logging.getLogger(__name__)

_BATCH_TASKS = 256
_RETRY_S = 0.5
_LATER = {"RESOURCE_EXHAUSTED", "UNAVAILABLE"}
"""Refusals that pass: the store is full, or no controller leads."""


class Outbox:
    def __init__(self, session: WorkerSession, held: HeldTasks, *, max_message_bytes: int) -> None:
        self._session = session
        self._held = held
        self._limit = max_message_bytes
        self._queue: dict[tuple[str, int], rollout_pb2.Group | rollout_pb2.ReturnedTask] = {}
        self._filled = asyncio.Event()
        self.submitted = 0
        """Groups acknowledged, accepted or not."""

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, outcome: rollout_pb2.Group | rollout_pb2.ReturnedTask) -> None:
        if isinstance(outcome, rollout_pb2.Group) and (size := outcome.ByteSize()) > self._limit:
            detail = f"{size} bytes, controller.max_message_mb allows {self._limit}"
            outcome = _failed(outcome.task, "group_too_large", detail)
        if isinstance(outcome, rollout_pb2.ReturnedTask):
            event(
                logger,
                "task returned",
                task=outcome.task.task_id,
                attempt=outcome.task.attempt,
                reason=outcome.reason,
                detail=outcome.detail,
            )
        self._queue[key_of(outcome.task)] = outcome
        self._filled.set()

    def withdraw(self, task: common_pb2.TaskRef) -> None:
        """The task belongs to another worker now."""
        self._queue.pop(key_of(task), None)

    def clear(self) -> None:
        """This incarnation is over, and its groups would be refused."""
        self._queue.clear()

    async def run(self) -> None:
        """Sends for as long as the worker lives."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._queue:
                if not await self._send():
                    await asyncio.sleep(_RETRY_S)

    async def _send(self) -> bool:
        """One request of each kind. False if the controller cannot take it at the moment."""
        caller = self._session.caller
        waiting = list(self._queue.values())
        groups = [item for item in waiting if isinstance(item, rollout_pb2.Group)]
        groups = first_batch(groups[:_BATCH_TASKS], self._limit)
        returns = [item for item in waiting if isinstance(item, rollout_pb2.ReturnedTask)]
        returns = returns[:_BATCH_TASKS]
        try:
            if groups:
                reply = await self._session.call(
                    "RolloutService.SubmitGroups",
                    rollout_pb2.SubmitRequest(caller=caller, groups=groups),
                )
                self._settle(caller, reply.results)
            if returns:
                reply = await self._session.call(
                    "RolloutService.ReturnTasks",
                    rollout_pb2.ReturnRequest(caller=caller, tasks=returns),
                )
                self._settle(caller, reply.results)
        except RequestRefused as refused:
            if refused.code in _LATER:
                event(logger, "submission postponed", logging.WARNING, why=refused.message)
                return False
            if self._session.caller == caller:
                # Fenced: the session will soon receive that this incarnation is over. Any other
                # refusal is this worker's own fault, and sending it again does not help.
                event(logger, "submission refused", logging.ERROR, why=str(refused))
                for task in [*(g.task for g in groups), *(r.task for r in returns)]:
                    self.withdraw(task)
                    self._held.release(task)
        return True

    def _settle(
        self, caller: common_pb2.Caller, results: Sequence[rollout_pb2.SubmitResult]
    ) -> None:
        if self._session.caller != caller:
            return
        for result in results:
            if result.verdict not in (rollout_pb2.VERDICT_ACCEPTED, rollout_pb2.VERDICT_DUPLICATE):
                event(
                    logger,
                    "not accepted",
                    task=result.task.task_id,
                    attempt=result.task.attempt,
                    verdict=rollout_pb2.Verdict.Name(result.verdict),
                    why=result.message,
                )
            item = self._queue.pop(key_of(result.task), None)
            is_group = isinstance(item, rollout_pb2.Group)
            if is_group and result.verdict == rollout_pb2.VERDICT_INVALID:
                self.put(_failed(result.task, "invalid_group", result.message[:1000]))
                continue
            self.submitted += is_group
            self._held.release(result.task)


def _failed(task: common_pb2.TaskRef, reason: str, detail: str) -> rollout_pb2.ReturnedTask:
    kind = rollout_pb2.RETURN_KIND_FAILED
    return rollout_pb2.ReturnedTask(task=task, kind=kind, reason=reason, detail=detail)
