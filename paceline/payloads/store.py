"""Payload store: the tokens of groups, from before they are submitted until a checkpoint covers
them.

A payload is one encoded group, under (task id, attempt). The rollout worker stores it before it
submits the group's metadata with its digest, so an accepted group has one unless the store has lost
it. Policy ranks read it, and compare the bytes with the digest, and what follows from them with the
metadata: a store that has changed bytes and a worker that lied are both found out. The leader
deletes it. The payload of a group that was not accepted is overwritten by a repeated attempt, or
deleted as an orphan.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from paceline.ids import TaskId

Ref = tuple[TaskId, int]
"""(task id, attempt), or ``partial_ref`` of a task."""
Refs = list[Ref]
Payloads = list[bytes | None]


class StoreUnavailable(OSError):
    """The store does not answer, or answers with an error. The operation may have happened; it may
    be repeated."""


class StoreFull(StoreUnavailable):
    """The store has no room for what was to be written. The message names the remedy."""


class PayloadStore(Protocol):
    """Payloads of one run, by (task id, attempt). Every method raises StoreUnavailable."""

    largest: int

    async def put(self, payloads: Mapping[Ref, bytes]) -> None:
        """Stores payloads, each completely or not at all. Raises StoreFull."""
        ...

    async def get(self, refs: Sequence[Ref]) -> Payloads:
        """In the order of ``refs``; None for an unknown one. For a few of them: see ``stream``."""
        ...

    def stream(self, refs: Sequence[Ref]) -> AsyncIterator[bytes | None]:
        """The same, a slice of bounded size at a time."""
        ...

    async def delete(self, refs: Sequence[Ref]) -> None:
        """Deletes payloads; unknown ones are no error."""
        ...

    async def list(self) -> Refs:
        """All stored payloads."""
        ...

    async def missing(self, refs: Sequence[Ref]) -> Refs:
        """Returns the ``refs`` that are not stored, without reading the others."""
        ...

    async def close(self) -> None:
        """Ends its connections."""
        ...


def partial_ref(task_id: TaskId) -> Ref:
    """Key of the partial work that a worker leaves of an unfinished task for the next lease.
    Attempts count from 1."""
    return TaskId(f"{task_id}.partial"), 0


def parse_ref(text: str) -> Ref:
    """Inverse of ``f"{task_id}-{attempt}"``."""
    task_id, _, attempt = text.rpartition("-")
    return TaskId(task_id), int(attempt)
