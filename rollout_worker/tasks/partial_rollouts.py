"""Reports of unfinished completions to the controller.

    engine ── every N tokens ──► newest of each task ──► one request at a time ──► stored there
                                                          (only what is new since the last one)

- The newest report of a task replaces one that has not been sent yet, so a slow controller costs
  freshness and no memory.
- A report carries the tokens after those that the controller has acknowledged. If it holds fewer,
  because Redis has lost the end of its data, the tokens after those are sent again.
- A report that was not kept, because the store is full, is part of the next one. The task is
  reported again once it has BACK_OFF times as many unsent tokens. The refused reports are then a
  geometric series, so a task is sent at most BACK_OFF / (BACK_OFF - 1) times its tokens, however
  long the store is full.
- Nothing waits for these reports. A lost one costs tokens that are generated again, never a
  completion.
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
from rollout_worker.engine.base import Completion, Finish, Request, token_count
from rollout_worker.tasks.held_tasks import HeldTask, HeldTasks, Stage, request_id_of
from rollout_worker.tasks.task_messages import first_batch, partial_group

logger = logging.getLogger(__name__)

BACK_OFF = 8
"""A task is sent at most 8/7 of its tokens. With the overhead of reports that is below 1.2 times
its payload."""

Counts = tuple[int, ...]
"""Tokens of each completion of a task."""


@dataclass
class ReportedTask:
    """What was reported of one task, and the newest that was not."""

    request: Request
    completions: Sequence[Completion | None]
    held: Counts
    """What the controller holds, as far as this worker knows."""
    marks: dict[int, Counts] = field(default_factory=dict)
    """The counts after each report, by their sum."""
    finished: int = 0
    """Completions that were reported as finished."""
    due: int = 0
    """Unsent tokens at which the next report is worth its bytes. The last one is taken for refused
    until the controller says what it holds, so an answer that never comes counts as a refusal."""

    @property
    def counts(self) -> Counts:
        return tuple(token_count(c) for c in self.completions)

    @property
    def news(self) -> bool:
        return self.counts != self.held or self._finished() > self.finished

    @property
    def worth_sending(self) -> bool:
        return self.news and self.unsent >= self.due

    def _finished(self) -> int:
        return sum(c is not None and c.finish is not Finish.PARTIAL for c in self.completions)

    @property
    def unsent(self) -> int:
        return sum(self.counts) - sum(self.held)

    def sent(self) -> None:
        self.marks[sum(self.counts)] = self.counts
        self.finished = self._finished()
        self.due = BACK_OFF * self.unsent

    def acknowledge(self, held: int) -> None:
        """The controller holds ``held`` tokens. Counts that are no report's end: it is sent all of
        them."""
        before = self.held
        self.held = self.marks.get(held, (0,) * len(self.completions))
        if self.held != before:
            self.due = 0


@dataclass
class PartialReporter:
    session: WorkerSession
    held: HeldTasks
    max_message_bytes: int
    _tasks: dict[str, ReportedTask] = field(default_factory=dict)
    """By request id."""
    _noted: dict[str, None] = field(default_factory=dict)
    """Request ids with news, oldest first."""
    _filled: asyncio.Event = field(default_factory=asyncio.Event)
    _sending: asyncio.Lock = field(default_factory=asyncio.Lock)

    def note(self, request: Request, completions: Sequence[Completion | None]) -> None:
        """The request's completions so far. Ignores requests that belong to no held task."""
        request_id = request.request_id
        if self._task(request_id) is None or not any(completions):
            return
        known = self._tasks.get(request_id)
        if known is None:
            self._tasks[request_id] = ReportedTask(request, completions, (0,) * len(completions))
        else:
            known.completions = completions
        self._noted[request_id] = None
        self._filled.set()

    def clear(self) -> None:
        self._tasks.clear()
        self._noted.clear()

    async def run(self) -> None:
        """Sends for ever."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            await self.flush()

    async def flush(self) -> None:
        """Returns once every report that is due is stored, or refused."""
        async with self._sending:
            while groups := self._next_groups():
                await self._send(groups)

    async def flush_all(self) -> None:
        """Also what was refused before: for a worker that leaves, it is the last chance to keep it."""
        for request_id, reported in self._tasks.items():
            reported.due = 0
            self._noted[request_id] = None
        await self.flush()

    def _next_groups(self) -> list[rollout_pb2.PartialGroup]:
        self._tasks = {name: task for name, task in self._tasks.items() if self._task(name)}
        batch = first_batch(self._encoded(), self.max_message_bytes)
        for group in batch:
            del self._noted[request_id_of(group.task)]
            self._tasks[request_id_of(group.task)].sent()
        return batch

    def _encoded(self) -> Iterator[rollout_pb2.PartialGroup]:
        """Drops reports of tasks that are no longer held and those that no message can carry."""
        for request_id in list(self._noted):
            task, reported = self._task(request_id), self._tasks.get(request_id)
            if task is None or reported is None or not reported.worth_sending:
                del self._noted[request_id]
                continue
            group = partial_group(
                task.lease.task,
                reported.request.prompt_tokens,
                reported.completions,
                reported.held,
            )
            if group.ByteSize() <= self.max_message_bytes:
                yield group
                continue
            del self._noted[request_id]
            event(logger, "partial work too large", task=request_id, bytes=group.ByteSize())

    async def _send(self, groups: list[rollout_pb2.PartialGroup]) -> None:
        request = rollout_pb2.PartialRequest(caller=self.session.caller, groups=groups)
        try:
            reply = await self.session.call("RolloutService.ReportPartials", request)
        except RequestRefused as refused:
            # Fenced, or the store is full. The task itself goes on.
            event(logger, "partial work refused", logging.WARNING, why=str(refused))
            return
        for group, result in zip(groups, reply.results, strict=False):
            if result.verdict == rollout_pb2.VERDICT_INVALID:
                event(
                    logger,
                    "partial work invalid",
                    logging.ERROR,
                    task=result.task.task_id,
                    why=result.message,
                )
            elif result.verdict == rollout_pb2.VERDICT_ACCEPTED:
                self._acknowledged(group, result.held)

    def _acknowledged(self, group: rollout_pb2.PartialGroup, held: int) -> None:
        request_id = request_id_of(group.task)
        reported = self._tasks.get(request_id)
        if reported is None:
            return
        reported.acknowledge(held)
        end = group.offset + sum(len(c.tokens) // 4 for c in group.completions)
        if held < group.offset or group.offset < held < end:
            # Some were lost there, or came before: sent again from what is held. Not if the
            # controller has no room (held is the offset): the next report tries again.
            self._noted[request_id] = None
            self._filled.set()

    def _task(self, request_id: str) -> HeldTask | None:
        """The unfinished task that this is the only request of."""
        task = self.held.find(request_id)
        if task is None or task.request is None or task.stage is Stage.FINISHED:
            return None
        return task
