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
from dataclasses import dataclass, field

from paceline.process.structured_log import event
from paceline.process.waits import WaitKind, waiting
from paceline.rpc.client import RequestRefused
from paceline.rpc.session import WorkerSession
from paceline.v1 import common_pb2, rollout_pb2
from rollout_worker.tasks.held_tasks import HeldTasks, request_id_of
from rollout_worker.tasks.task_messages import first_batch, returned

logger = logging.getLogger(__name__)

_BATCH_TASKS = 256
_RETRY_S = 0.5
_LATER = {"RESOURCE_EXHAUSTED", "UNAVAILABLE"}
"""Refusals that pass: the store is full, or no controller leads."""


@dataclass
class Outbox:
    session: WorkerSession
    held: HeldTasks
    max_message_bytes: int
    _queue: dict[str, rollout_pb2.Group | rollout_pb2.ReturnedTask] = field(default_factory=dict)
    """By request id."""
    _filled: asyncio.Event = field(default_factory=asyncio.Event)
    submitted: int = 0
    """Groups acknowledged, accepted or not."""

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, outcome: rollout_pb2.Group | rollout_pb2.ReturnedTask) -> None:
        size, most = outcome.ByteSize(), self.max_message_bytes
        if isinstance(outcome, rollout_pb2.Group) and size > most:
            detail = f"{size} bytes, controller.max_message_mb allows {most}"
            outcome = returned(outcome.task, "group_too_large", detail)
        if isinstance(outcome, rollout_pb2.ReturnedTask):
            event(
                logger,
                "task returned",
                task=outcome.task.task_id,
                attempt=outcome.task.attempt,
                reason=outcome.reason,
                detail=outcome.detail,
            )
        self._queue[request_id_of(outcome.task)] = outcome
        self._filled.set()

    def withdraw(self, task: common_pb2.TaskRef) -> None:
        """The task belongs to another worker now."""
        self._queue.pop(request_id_of(task), None)

    def clear(self) -> None:
        """This incarnation is over, and its groups would be refused."""
        self._queue.clear()

    async def run(self) -> None:
        """Sends for as long as the worker lives."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            with waiting(WaitKind.VERDICT, "submitting groups"):
                while self._queue:
                    if not await self._send():
                        await asyncio.sleep(_RETRY_S)

    async def _send(self) -> bool:
        """One request of each kind. False if the controller cannot take it at the moment."""
        caller = self.session.caller
        waiting = list(self._queue.values())
        groups = [item for item in waiting if isinstance(item, rollout_pb2.Group)]
        groups = first_batch(groups[:_BATCH_TASKS], self.max_message_bytes)
        returns = [item for item in waiting if isinstance(item, rollout_pb2.ReturnedTask)]
        returns = returns[:_BATCH_TASKS]
        try:
            if groups:
                submission = rollout_pb2.SubmitRequest(caller=caller, groups=groups)
                reply = await self.session.call("RolloutService.SubmitGroups", submission)
                self._settle(caller, reply.results)
            if returns:
                giving_back = rollout_pb2.ReturnRequest(caller=caller, tasks=returns)
                reply = await self.session.call("RolloutService.ReturnTasks", giving_back)
                self._settle(caller, reply.results)
        except RequestRefused as refused:
            if refused.code in _LATER:
                event(logger, "submission postponed", logging.WARNING, why=refused.message)
                return False
            if self.session.caller == caller:
                # Fenced: the session will soon receive that this incarnation is over. Any other
                # refusal is this worker's own fault, and sending it again does not help.
                event(logger, "submission refused", logging.ERROR, why=str(refused))
                for task in [*(g.task for g in groups), *(r.task for r in returns)]:
                    self.withdraw(task)
                    self.held.release(task)
        return True

    def _settle(
        self, caller: common_pb2.Caller, results: Sequence[rollout_pb2.SubmitResult]
    ) -> None:
        if self.session.caller != caller:
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
            item = self._queue.pop(request_id_of(result.task), None)
            is_group = isinstance(item, rollout_pb2.Group)
            if is_group and result.verdict == rollout_pb2.VERDICT_INVALID:
                self.put(returned(result.task, "invalid_group", result.message))
                continue
            self.submitted += is_group
            self.held.release(result.task)
