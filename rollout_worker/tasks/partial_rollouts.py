"""What running tasks have so far, on its way to the controller.

    engine ── every N tokens ──► newest of each task ──► one request at a time ──► stored there

The newest report of a task replaces one that has not been sent yet, so a slow controller costs
freshness and no memory. Nothing waits for these reports, and one that is lost costs tokens that are
made again, never a sample.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from paceline.process.structured_log import event
from paceline.rpc.client import RequestRefused
from paceline.v1 import common_pb2, rollout_pb2
from rollout_worker.engine.base import Completion, Request
from rollout_worker.tasks.held_tasks import HeldTask, HeldTasks, Stage
from rollout_worker.tasks.partial_encoding import partial_group

logger = logging.getLogger(__name__)

_BATCH_BYTES = 8 << 20


class PartialReporter:
    """``call(method, request)``: the control plane. ``caller()``: who this worker is now."""

    def __init__(
        self,
        call: Callable[[str, Any], Any],
        caller: Callable[[], common_pb2.Caller],
        held: HeldTasks,
        *,
        max_message_bytes: int,
    ) -> None:
        self._call = call
        self._caller = caller
        self._held = held
        self._limit = max_message_bytes
        self._newest: dict[str, tuple[Request, Sequence[Completion | None]]] = {}
        """By request id."""
        self._filled = asyncio.Event()
        self._sending = asyncio.Lock()
        self.reported = 0
        """Reports that the controller has taken."""

    def note(self, request: Request, samples: Sequence[Completion | None]) -> None:
        """What the request's samples have so far. Requests that are no held task's are ignored."""
        if self._task(request.request_id) is not None and any(samples):
            self._newest[request.request_id] = request, samples
            self._filled.set()

    def clear(self) -> None:
        self._newest.clear()

    async def run(self) -> None:
        """Sends for ever."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            await self.flush()

    async def flush(self) -> None:
        """Returns once everything noted so far is stored, or refused."""
        async with self._sending:
            while groups := self._next_groups():
                await self._send(groups)

    def _next_groups(self) -> list[rollout_pb2.PartialGroup]:
        batch: list[rollout_pb2.PartialGroup] = []
        size = 0
        for request_id in list(self._newest):
            request, samples = self._newest[request_id]
            task = self._task(request_id)
            if task is None:
                del self._newest[request_id]
                continue
            group = partial_group(task.lease.task, request.prompt_tokens, samples)
            if group.ByteSize() > self._limit:
                del self._newest[request_id]
                event(logger, "partial work too large", task=request_id, bytes=group.ByteSize())
                continue
            size += group.ByteSize()
            if batch and size > min(_BATCH_BYTES, self._limit):
                break
            del self._newest[request_id]
            batch.append(group)
        return batch

    async def _send(self, groups: list[rollout_pb2.PartialGroup]) -> None:
        request = rollout_pb2.PartialRequest(caller=self._caller(), groups=groups)
        try:
            reply = await self._call("RolloutService.ReportPartials", request)
        except RequestRefused as refused:
            # Fenced, or the store is full. The task itself is not concerned.
            event(logger, "partial work refused", logging.WARNING, why=str(refused))
            return
        for result in reply.results:
            self.reported += result.verdict == rollout_pb2.VERDICT_ACCEPTED
            if result.verdict == rollout_pb2.VERDICT_INVALID:
                event(
                    logger,
                    "partial work invalid",
                    logging.ERROR,
                    task=result.task.task_id,
                    why=result.message,
                )

    def _task(self, request_id: str) -> HeldTask | None:
        """The unfinished task whose one and only request this is."""
        task = self._held.of_request(request_id)
        if task is None or task.request is None or task.stage is Stage.FINISHED:
            return None
        return task
