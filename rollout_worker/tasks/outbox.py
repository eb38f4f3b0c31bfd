"""Finished work on its way to the controller: groups to submit, tasks to return.

    put ──► queue ──► one request at a time, carrying all that gathered meanwhile ──► verdicts ──► release

- What is in the outbox stays held until its verdict is read; an outage of the control plane only
  delays it, and saying a group twice counts once.
- A verdict other than INVALID ends the worker's part, whatever it is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

from paceline.process.structured_log import event
from paceline.rpc.client import RequestRefused
from paceline.v1 import common_pb2, rollout_pb2
from rollout_worker.tasks.held_tasks import HeldTasks

logger = logging.getLogger(__name__)

_BATCH_BYTES = 8 << 20
_BATCH_TASKS = 256
_RETRY_S = 0.5
_LATER = {"RESOURCE_EXHAUSTED", "UNAVAILABLE"}
"""Refusals that pass: the store is full, or nobody leads."""


class Outbox:
    """``call(method, request)``: the control plane. ``caller()``: who this worker is now."""

    def __init__(
        self,
        call: Callable[[str, Any], Any],
        caller: Callable[[], common_pb2.Caller],
        held: HeldTasks,
        *,
        max_message_bytes: int,
        released: Callable[[], None],
    ) -> None:
        self._call = call
        self._caller = caller
        self._held = held
        self._limit = max_message_bytes
        self._released = released
        self._groups: list[rollout_pb2.Group] = []
        self._returns: list[rollout_pb2.ReturnedTask] = []
        self._filled = asyncio.Event()
        self.submitted = 0
        """Groups acknowledged, accepted or not."""

    def __len__(self) -> int:
        return len(self._groups) + len(self._returns)

    def put(self, outcome: rollout_pb2.Group | rollout_pb2.ReturnedTask) -> None:
        if isinstance(outcome, rollout_pb2.Group):
            size = outcome.ByteSize()
            if size > self._limit:
                outcome = rollout_pb2.ReturnedTask(
                    task=outcome.task,
                    kind=rollout_pb2.RETURN_KIND_FAILED,
                    reason="group_too_large",
                    detail=f"{size} bytes, controller.max_message_mb allows {self._limit}",
                )
        if isinstance(outcome, rollout_pb2.Group):
            self._groups.append(outcome)
        else:
            self._returns.append(outcome)
            event(
                logger,
                "task returned",
                task=outcome.task.task_id,
                attempt=outcome.task.attempt,
                reason=outcome.reason,
                detail=outcome.detail,
            )
        self._filled.set()

    def withdraw(self, task: common_pb2.TaskRef) -> None:
        """This task is somebody else's now."""
        self._drop({(task.task_id, task.attempt)})

    def clear(self) -> None:
        """This incarnation is over: nobody wants its groups any more."""
        self._groups.clear()
        self._returns.clear()

    async def run(self) -> None:
        """Sends for as long as the worker lives."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._groups or self._returns:
                if not await self._send():
                    await asyncio.sleep(_RETRY_S)

    async def _send(self) -> bool:
        """One request of each kind. False where the controller cannot take it for the moment."""
        caller = self._caller()
        groups, returns = self._next_groups(), self._returns[:_BATCH_TASKS]
        try:
            if groups:
                reply = await self._call(
                    "RolloutService.SubmitGroups",
                    rollout_pb2.SubmitRequest(caller=caller, groups=groups),
                )
                self._settle(caller, self._groups, reply.results)
            if returns:
                reply = await self._call(
                    "RolloutService.ReturnTasks",
                    rollout_pb2.ReturnRequest(caller=caller, tasks=returns),
                )
                self._settle(caller, self._returns, reply.results)
        except RequestRefused as refused:
            if refused.code in _LATER:
                event(logger, "submission put off", logging.WARNING, why=refused.message)
                return False
            if self._caller() == caller:
                # Fenced: the session is about to learn that this incarnation is over. Anything
                # else is this worker's own fault and is not mended by saying it again.
                event(logger, "submission refused", logging.ERROR, why=str(refused))
                self._forget([*groups, *returns])
        return True

    def _next_groups(self) -> list[rollout_pb2.Group]:
        batch: list[rollout_pb2.Group] = []
        size = 0
        for group in self._groups[:_BATCH_TASKS]:
            size += group.ByteSize()
            if batch and size > min(_BATCH_BYTES, self._limit):
                break
            batch.append(group)
        return batch

    def _settle(
        self,
        caller: common_pb2.Caller,
        queue: list[Any],
        results: Iterable[rollout_pb2.SubmitResult],
    ) -> None:
        if self._caller() != caller:
            return
        done: dict[tuple[str, int], rollout_pb2.SubmitResult] = {
            (r.task.task_id, r.task.attempt): r for r in results
        }
        kept = [item for item in queue if (item.task.task_id, item.task.attempt) not in done]
        was_groups = queue is self._groups
        queue[:] = kept
        for result in done.values():
            self._tell(result)
            if was_groups and result.verdict == rollout_pb2.VERDICT_INVALID:
                self.put(
                    rollout_pb2.ReturnedTask(
                        task=result.task,
                        kind=rollout_pb2.RETURN_KIND_FAILED,
                        reason="invalid_group",
                        detail=result.message[:1000],
                    )
                )
                continue
            self.submitted += was_groups
            self._held.release(result.task)
        self._released()

    def _forget(self, items: list[Any]) -> None:
        for item in items:
            self._held.release(item.task)
        self._drop({(item.task.task_id, item.task.attempt) for item in items})
        self._released()

    def _drop(self, keys: set[tuple[str, int]]) -> None:
        for queue in (self._groups, self._returns):
            queue[:] = [i for i in queue if (i.task.task_id, i.task.attempt) not in keys]

    def _tell(self, result: rollout_pb2.SubmitResult) -> None:
        if result.verdict in (rollout_pb2.VERDICT_ACCEPTED, rollout_pb2.VERDICT_DUPLICATE):
            return
        event(
            logger,
            "not accepted",
            task=result.task.task_id,
            attempt=result.task.attempt,
            verdict=rollout_pb2.Verdict.Name(result.verdict),
            why=result.message,
        )
