"""Reports of unfinished completions to the controller.

    engine ── every N tokens ──► newest of each task ──► one request at a time ──► stored there

The newest report of a task replaces one that has not been sent yet, so a slow controller costs
freshness and no memory. Nothing waits for these reports. A lost one costs tokens that are generated
again, never a completion.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from paceline.process.structured_log import event
from paceline.rpc.client import RequestRefused
from paceline.rpc.session import WorkerSession
from paceline.v1 import rollout_pb2
from rollout_worker.engine.base import Completion, Request
from rollout_worker.tasks.held_tasks import HeldTask, HeldTasks, Stage, request_id_of
from rollout_worker.tasks.task_messages import first_batch, partial_group

logger = logging.getLogger(__name__)


@dataclass
class PartialReporter:
    session: WorkerSession
    held: HeldTasks
    max_message_bytes: int
    _newest: dict[str, tuple[Request, Sequence[Completion | None]]] = field(default_factory=dict)
    """By request id."""
    _filled: asyncio.Event = field(default_factory=asyncio.Event)
    _sending: asyncio.Lock = field(default_factory=asyncio.Lock)

    def note(self, request: Request, completions: Sequence[Completion | None]) -> None:
        """The request's completions so far. Ignores requests that belong to no held task."""
        if self._task(request.request_id) is not None and any(completions):
            self._newest[request.request_id] = request, completions
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
        batch = first_batch(self._encoded(), self.max_message_bytes)
        for group in batch:
            del self._newest[request_id_of(group.task)]
        return batch

    def _encoded(self) -> Iterator[rollout_pb2.PartialGroup]:
        """Drops reports of tasks that are no longer held and those that no message can carry."""
        for request_id, (request, completions) in list(self._newest.items()):
            task = self._task(request_id)
            if task is None:
                del self._newest[request_id]
                continue
            group = partial_group(task.lease.task, request.prompt_tokens, completions)
            if group.ByteSize() <= self.max_message_bytes:
                yield group
                continue
            del self._newest[request_id]
            event(logger, "partial work too large", task=request_id, bytes=group.ByteSize())

    async def _send(self, groups: list[rollout_pb2.PartialGroup]) -> None:
        request = rollout_pb2.PartialRequest(caller=self.session.caller, groups=groups)
        try:
            reply = await self.session.call("RolloutService.ReportPartials", request)
        except RequestRefused as refused:
            # Fenced, or the store is full. The task itself goes on.
            event(logger, "partial work refused", logging.WARNING, why=str(refused))
            return
        for result in reply.results:
            if result.verdict == rollout_pb2.VERDICT_INVALID:
                event(
                    logger,
                    "partial work invalid",
                    logging.ERROR,
                    task=result.task.task_id,
                    why=result.message,
                )

    def _task(self, request_id: str) -> HeldTask | None:
        """The unfinished task that this is the only request of."""
        task = self.held.find(request_id)
        if task is None or task.request is None or task.stage is Stage.FINISHED:
            return None
        return task
