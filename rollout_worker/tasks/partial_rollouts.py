"""Partial rollouts: the tokens of unfinished tasks in the payload store, for their next lease.

    engine ── every N tokens ──► newest of each task ──► payload store ──► prefixes of the next
                                                                           lease's request

No promise depends on them. Tokens, log-probs and versions stay as they were, and the next attempt's
random numbers are those of the same seed, completion and position (see Engine.exact_continuation).
A prefix is used only after the prompt that it continues, and only up to the version that the engine
serves: within a completion versions never fall.

A blob is complete by itself (prompt, tokens, log-probs and versions), so one that is lost, late or
of an earlier attempt costs tokens that are generated again, never a completion. A task is written
again once it has grown by a quarter: all its writes together are at most five times its payload.
The controller deletes the blobs of finished tasks.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from paceline.ids import ANY, TaskId
from paceline.payloads.group_payload import check_logprobs, version_spans
from paceline.payloads.store import PayloadStore, StoreUnavailable, partial_ref
from paceline.process.structured_log import event, first_line
from paceline.v1 import common_pb2, rollout_pb2
from rollout_worker.engine.base import Completion, Finish, Request, first_spans, token_count
from rollout_worker.generated_group import FINISH_REASONS, completion_fields, token_bytes
from rollout_worker.held_tasks import HeldTask, HeldTasks, Stage

logger = logging.getLogger(__name__)
_FINISHES = {reason: finish for finish, reason in FINISH_REASONS.items()}

GROWTH = 1.25  # Tokens of a task at which it is written again, relative to those of the last write


@dataclass
class PartialRollouts:
    held: HeldTasks
    store: PayloadStore | None = None  # Set once it is known. None: nothing is written or read.
    continued_tokens: int = 0
    """Tokens that other workers had generated and that were not generated again."""
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
        ``last``: no more will come, so they are written however little is new."""
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
        while True:
            await self._filled.wait()
            self._filled.clear()
            await self.flush()

    async def flush(self) -> None:
        """Returns once everything that was noted is written, or cannot be."""
        async with self._writing:
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
        ``version``: that the engine serves."""
        if self.store is None or lease.task.attempt == 1:
            return ()
        try:
            (blob,) = await self.store.get([partial_ref(TaskId(lease.task.task_id))])
            group = rollout_pb2.PartialGroup.FromString(blob or b"")
            prefixes = prefixes_of(group, lease, prompt, max_tokens=max_tokens, version=version)
        except (StoreUnavailable, DecodeError, ValueError) as error:
            event(logger, "partial work not read", logging.ERROR, why=first_line(error))
            return ()
        if prefixes:
            tokens = sum(map(token_count, prefixes))
            self.continued_tokens += tokens
            event(logger, "continued", task=lease.task.task_id, tokens=tokens)
        return prefixes

    def _task(self, request_id: str) -> HeldTask | None:
        """The unfinished task that this is the only request of."""
        task = self.held.find(request_id)
        if task is None or task.request is None or task.stage is Stage.FINISHED:
            return None
        return task


def partial_group(
    task: common_pb2.TaskRef,
    prompt_tokens: NDArray[np.int32],
    completions: Sequence[Completion | None],
) -> rollout_pb2.PartialGroup:
    """``completions``: one for each of the group; None: no token of it yet."""
    return rollout_pb2.PartialGroup(
        task=task,
        prompt_tokens=token_bytes(prompt_tokens),
        completions=[
            rollout_pb2.PartialCompletion(**(completion_fields(c) | {"stop": c.stop} if c else {}))
            for c in completions
        ],
    )


def prefixes_of(
    partial: rollout_pb2.PartialGroup,
    lease: rollout_pb2.Lease,
    prompt_tokens: NDArray[np.int32],
    *,
    max_tokens: int,
    version: int,
) -> tuple[Completion | None, ...]:
    """The prefix of each completion of the lease; empty if there is none at all. Raises Invalid.
    ``version``: that the engine serves."""
    count = lease.group_size
    if len(partial.completions) != count or partial.prompt_tokens != token_bytes(prompt_tokens):
        return ()
    prefixes = tuple(_prefix(c, lease, max_tokens, version) for c in partial.completions)
    return prefixes if any(prefixes) else ()


def _prefix(
    completion: rollout_pb2.PartialCompletion,
    lease: rollout_pb2.Lease,
    max_tokens: int,
    version: int,
) -> Completion | None:
    tokens = np.frombuffer(completion.tokens, dtype="<i4")
    spans = version_spans(completion, len(tokens), newest=ANY)
    logprobs = np.frombuffer(completion.logprobs, dtype="<f4")
    check_logprobs(logprobs)
    finish, stop = _FINISHES[completion.finish_reason], completion.stop or None
    if not spans or spans[0][0] < lease.oldest_fresh or spans[-1][0] < lease.newest_fresh:
        return None
    # Versions never fall within a completion, and this engine may be behind.
    usable = [(v, length) for v, length in spans if v <= version]
    if finish is Finish.PARTIAL or usable != spans:
        spans, finish, stop = usable, Finish.PARTIAL, None
    count = sum(length for _, length in spans)
    if not count:
        return None
    if count > max_tokens:
        # The limit was lowered since: a longer completion would be refused.
        spans = list(first_spans(spans, max_tokens))
        count, finish, stop = max_tokens, Finish.LENGTH, None
    elif finish is Finish.PARTIAL and count == max_tokens:
        finish = Finish.LENGTH
    return Completion(
        tokens[:count].astype(np.int32),
        logprobs[:count].astype(np.float32),
        tuple(spans),
        finish,
        stop,
    )
