"""Partial rollouts: the tokens of unfinished tasks in the payload store, for their next lease.

    engine ── every N tokens ──► newest of each task ──► payload store ──► next lease of the task
                                                                           └──► prefixes of its request

No promise depends on them. A blob is complete by itself (prompt, tokens, log-probs and versions), so
one that is lost, late or of an earlier attempt costs tokens that are generated again, never a
completion. A task is written again once it has grown by a quarter: all its writes together are at
most five times its payload. The controller deletes the blobs of finished tasks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from paceline.ids import TaskId
from paceline.payloads.store import PayloadStore, StoreUnavailable, partial_ref
from paceline.process.structured_log import event, first_line
from paceline.v1 import rollout_pb2
from rollout_worker.engine.base import Completion, Request, token_count
from rollout_worker.tasks.held_tasks import HeldTask, HeldTasks, Stage
from rollout_worker.tasks.task_messages import partial_group, prefixes_of

logger = logging.getLogger(__name__)

GROWTH = 1.25
"""Tokens of a task at which it is written again, relative to those of the last write."""


@dataclass
class PartialRollouts:
    held: HeldTasks
    store: PayloadStore | None = None
    """Set once it is known. None: nothing is written or read."""
    _noted: dict[str, Sequence[Completion | None]] = field(default_factory=dict)
    """The newest completions of each request, if they are worth a write; by request id."""
    _written: dict[str, int] = field(default_factory=dict)
    """Tokens of each request at its last write."""
    _filled: asyncio.Event = field(default_factory=asyncio.Event)
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def note(
        self, request: Request, completions: Sequence[Completion | None], *, last: bool = False
    ) -> None:
        """Takes a request's completions so far. Ignores requests that belong to no held task.

        ``last``: no more will come, so they are written however little is new.
        """
        if self._task(request.request_id) is None:
            return
        tokens, written = sum(map(token_count, completions)), self._written.get(request.request_id)
        if tokens and (last or written is None or tokens >= GROWTH * written):
            self._noted[request.request_id] = completions
            self._filled.set()

    def clear(self) -> None:
        self._noted.clear()
        self._written.clear()

    async def run(self) -> None:
        """Writes for ever."""
        while True:
            await self._filled.wait()
            self._filled.clear()
            await self.flush()

    async def flush(self) -> None:
        """Returns once everything that was noted is written, or cannot be."""
        async with self._writing:
            await self._write()

    async def _write(self) -> None:
        noted, self._noted = self._noted, {}
        self._written = {name: n for name, n in self._written.items() if self._task(name)}
        payloads = {}
        for request_id, completions in noted.items():
            task = self._task(request_id)
            if task is None or task.request is None:
                continue
            ref = task.lease.task
            group = partial_group(ref, task.request.prompt_tokens, completions)
            payloads[partial_ref(TaskId(ref.task_id))] = group.SerializeToString()
            self._written[request_id] = sum(map(token_count, completions))
        if not payloads or self.store is None:
            return
        try:
            await self.store.put(payloads)
        except StoreUnavailable as error:
            event(logger, "partial work not stored", logging.WARNING, why=first_line(error))

    async def prefixes(
        self, lease: rollout_pb2.Lease, prompt: NDArray[np.int32], *, max_tokens: int, version: int
    ) -> tuple[Completion | None, ...]:
        """The prefix of each completion that an earlier attempt has left; empty if there is none.

        ``version``: that the engine serves.
        """
        if self.store is None:
            return ()
        try:
            (blob,) = await self.store.get([partial_ref(TaskId(lease.task.task_id))])
        except StoreUnavailable as error:
            event(logger, "partial work not read", logging.WARNING, why=first_line(error))
            return ()
        if blob is None:
            return ()
        try:
            group = rollout_pb2.PartialGroup.FromString(blob)
            prefixes = prefixes_of(group, lease, prompt, max_tokens=max_tokens, version=version)
        except (DecodeError, ValueError) as error:
            event(logger, "partial work invalid", logging.ERROR, why=first_line(error))
            return ()
        if prefixes:
            tokens = sum(map(token_count, prefixes))
            event(logger, "continued", task=lease.task.task_id, tokens=tokens)
        return prefixes

    def _task(self, request_id: str) -> HeldTask | None:
        """The unfinished task that this is the only request of."""
        task = self.held.find(request_id)
        if task is None or task.request is None or task.stage is Stage.FINISHED:
            return None
        return task
