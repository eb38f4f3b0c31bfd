"""Partial rollouts: the tokens of running tasks, kept beside the ledger for the next lease of the
task.

    ReportPartials ──check──► store (chunks of each task) ──► the next lease of the task ──► deleted with it

No promise depends on a report. The chunks of a task make up a consistent prefix of it (tokens,
log-probs and versions), so if one is lost, late or stale, at most some tokens are generated again.

- The chunks of one attempt are kept for a task, the newest that reported. A deposed leader cannot
  store one.
- A sample continues only if it would still be trained if it ended now (``views.may_continue``).
  Otherwise it starts again from the prompt.
- A size limit bounds all reports together. A chunk that would exceed it is not kept.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from google.protobuf.message import DecodeError
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from controller.errors import NotLeading
from controller.ledger.commands import LeasedTask
from controller.ledger.events import EvalTaskDone, Event, GroupAccepted, TaskDropped
from controller.ledger.state.state import State
from controller.ledger.views.views import may_continue, unfinished
from controller.store.partial_store import NOTHING, Kept, Partial, PartialStore
from paceline.ids import TaskId, Version
from paceline.process.structured_log import event
from paceline.v1 import common_pb2, rollout_pb2

log = logging.getLogger(__name__)


class PartialRollouts:
    """Reports that one leader stores and hands out. ``state`` is the ledger's."""

    def __init__(self, store: PartialStore, state: State, *, term: int, limit_bytes: int) -> None:
        self._store = store
        self._state = state
        self._term = term
        self._limit = limit_bytes
        self._sizes: dict[TaskId, Kept] = {}
        """Stored reports by task, as far as this leader knows."""
        self._writing = 0
        """Bytes of reports that are being stored."""
        self._unsure: set[TaskId] = set()
        """Tasks that may have a report: the store did not answer when it was written."""
        self._full = False

    async def begin(self) -> None:
        """Reads the sizes of stored reports, and deletes the reports of finished tasks."""
        try:
            found = await self._store.sizes()
        except (RedisError, OSError):
            return
        for task_id, kept in found.items():
            self._sizes[task_id] = max(kept, self._sizes.get(task_id, kept))
        await self.delete([task_id for task_id in found if not unfinished(self._state, task_id)])

    async def keep(self, partials: Sequence[Partial]) -> list[Kept]:
        """Stores chunks; what is held of each task afterwards, with or without the chunk. Raises
        NotLeading if the term is over or Redis does not answer; the worker then repeats the
        request."""
        fitting: dict[int, Partial] = {}
        room = self._limit - self._writing - sum(kept.size for kept in self._sizes.values())
        after: dict[TaskId, Kept] = {}
        more = 0
        for number, partial in enumerate(partials):
            kept = after.get(partial.task_id, self._held(partial.task_id))
            new = partial.after(kept)
            if more + new.size - kept.size <= room:
                more += new.size - kept.size
                after[partial.task_id] = new
                fitting[number] = partial
        more = max(more, 0)
        self._writing += more
        held: list[Kept] | None = []
        try:
            if fitting:
                held = await self._store.put(self._term, list(fitting.values()))
        except (OutOfMemoryError, ResponseError) as error:
            self._say_full(str(error))
            return [self._held(p.task_id) for p in partials]
        except (RedisError, OSError) as error:
            self._unsure.update(after)
            raise NotLeading(f"waiting for the store ({type(error).__name__})") from error
        finally:
            self._writing -= more
        if held is None:
            raise NotLeading("stepped down")
        # Only now: a chunk that was not stored must not count towards the limit. Redis may have
        # lost some.
        for partial, kept in zip(fitting.values(), held, strict=True):
            self._sizes[partial.task_id] = kept
        self._say_full(
            "" if len(fitting) == len(partials) else "rollout.partial_store_mb is used up"
        )
        answer = [self._held(p.task_id) for p in partials]
        # A task may have finished, and its report been deleted, before the report was stored.
        done = [p.task_id for p in fitting.values() if not unfinished(self._state, p.task_id)]
        await self.delete(done)
        return answer

    def _held(self, task_id: TaskId) -> Kept:
        return self._sizes.get(task_id, NOTHING)

    async def of(
        self, leases: Sequence[LeasedTask], limit_bytes: int
    ) -> dict[TaskId, rollout_pb2.PartialGroup]:
        """The usable parts of reports by task, for tasks that are leased again."""
        again = [lease.task_id for lease in leases if lease.attempt > 1]
        if not again:
            return {}
        try:
            found = await self._store.get(again)
        except (RedisError, OSError) as error:
            event(log, "partial work not read", logging.WARNING, why=type(error).__name__)
            return {}
        usable = {}
        for task_id, chunks in zip(again, found, strict=True):
            whole = whole_group(chunks)
            part = fresh_part(self._state, whole) if whole is not None else None
            if part is not None and (limit_bytes := limit_bytes - part.ByteSize()) >= 0:
                usable[task_id] = part
        return usable

    def finished(self, events: Iterable[Event]) -> list[TaskId]:
        """Tasks that these events have finished and that may have a report."""
        done = set()
        for e in events:
            if isinstance(e, GroupAccepted):
                done.add(e.group.task_id)
            elif isinstance(e, TaskDropped | EvalTaskDone):
                done.add(e.task_id)
        return sorted(done & (self._sizes.keys() | self._unsure))

    async def delete(self, task_ids: Sequence[TaskId]) -> None:
        try:
            await self._store.delete(task_ids)
        except (RedisError, OSError) as error:
            # The next leader deletes it.
            event(log, "partial work not deleted", logging.WARNING, why=type(error).__name__)
            return
        for task_id in task_ids:
            self._sizes.pop(task_id, None)
            self._unsure.discard(task_id)

    def _say_full(self, why: str) -> None:
        if why and not self._full:
            event(log, "partial work not kept", logging.WARNING, why=why)
        self._full = bool(why)


def whole_group(chunks: Sequence[bytes]) -> rollout_pb2.PartialGroup | None:
    """The group that the chunks of one attempt make up; None if they do not fit together."""
    try:
        parts = [rollout_pb2.PartialGroup.FromString(chunk) for chunk in chunks]
    except DecodeError:
        return None
    if not parts or any(len(p.completions) != len(parts[0].completions) for p in parts):
        return None
    held = 0
    for part in parts:
        if part.offset != held:
            return None
        held += sum(len(completion.tokens) // 4 for completion in part.completions)
    whole = rollout_pb2.PartialGroup(task=parts[0].task, prompt_tokens=parts[0].prompt_tokens)
    for pieces in zip(*(part.completions for part in parts), strict=True):
        whole.completions.append(_joined(pieces))
    return whole


def _joined(pieces: Sequence[rollout_pb2.PartialCompletion]) -> rollout_pb2.PartialCompletion:
    spans: list[common_pb2.VersionSpan] = []
    for span in (span for piece in pieces for span in piece.versions):
        if spans and spans[-1].version == span.version:
            spans[-1].length += span.length
        else:
            spans.append(common_pb2.VersionSpan(version=span.version, length=span.length))
    return rollout_pb2.PartialCompletion(
        tokens=b"".join([piece.tokens for piece in pieces]),
        logprobs=b"".join([piece.logprobs for piece in pieces]),
        versions=spans,
        finish_reason=max(piece.finish_reason for piece in pieces),
        stop=next((piece.stop for piece in pieces if piece.stop), ""),
    )


def fresh_part(state: State, group: rollout_pb2.PartialGroup) -> rollout_pb2.PartialGroup | None:
    """The group without the tokens of samples that are too stale; None if all of them are."""
    stale = 0
    for completion in group.completions:
        spans = completion.versions
        if spans and not may_continue(
            state,
            TaskId(group.task.task_id),
            Version(spans[0].version),
            Version(spans[-1].version),
        ):
            completion.Clear()
            stale += 1
    if stale:
        event(log, "partial work discarded", task=group.task.task_id, samples=stale, why="stale")
    return group if any(c.versions for c in group.completions) else None
