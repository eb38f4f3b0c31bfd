"""The interface of a provider, and what the providers have in common.

    ledger's desired counts ──► status ──► converge ──► processes start, or are asked to leave

- A provider is told what should be true, again and again; it keeps nothing that it could not find
  out anew. So it survives failovers, and a lost or repeated turn does no harm.
- It never ends a worker that has work: surplus workers are drained through the ledger, or by the
  scheduler's own farewell (`paceline drain --wait` before the signal).
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from paceline.v1 import admin_pb2, common_pb2

ROLES = ("policy", "rollout")
GONE = ("dead", "stopped")
LEAVING = ("draining",)
AT_WORK = ("waiting", "running", "paused")
"""Phases of a run in which it wants workers."""

Drain = Callable[[admin_pb2.WorkerStatus], Awaitable[None]]
"""Asks one worker to leave without lowering the wanted number. Idempotent for one process."""


class Trouble(Exception):
    """What keeps a provider from its work, in one line with the remedy where one is known."""


class Provider(ABC):
    """Moves the fleet towards the desired counts."""

    name: str
    quiet_s: float = 10.0
    """Where nothing has changed in the ledger, it looks again after this many seconds."""

    @abstractmethod
    async def converge(self, status: admin_pb2.StatusReply) -> str:
        """One turn towards ``status.desired``. Returns quickly; never blocks the event loop.

        The line it returns says what is still missing, for people; empty: nothing. Raises Trouble
        where nothing can be done now: it is called again a little later.
        """

    async def close(self) -> None:  # noqa: B027  (most have nothing to let go of)
        """Lets go of connections. What runs goes on running."""


@dataclass(frozen=True, slots=True)
class Moves:
    """Of one role: how many to start, and which to let go."""

    start: int
    drain: tuple[str, ...]


def moves(wanted: int, staying: Iterable[str]) -> Moves:
    """``staying``: names of the workers that are there, or coming, and not leaving. The youngest
    leave first: those with the highest number."""
    names = sorted(staying, key=number, reverse=True)
    return Moves(max(0, wanted - len(names)), tuple(names[: max(0, len(names) - wanted)]))


def number(name: str) -> tuple[int, str]:
    """The number a name ends with, -1 for none; and the name, so that the order is total."""
    found = re.search(r"(\d+)$", name)
    return (int(found[1]) if found else -1), name


def role_of(worker: admin_pb2.WorkerStatus) -> str:
    return "policy" if worker.role == common_pb2.ROLE_POLICY else "rollout"


def desired_of(status: admin_pb2.StatusReply, role: str) -> int:
    """Processes of a role: those wanted at work, and the spares."""
    return int(status.desired[role]) + int(status.spares.get(role, 0))


def staying(status: admin_pb2.StatusReply, role: str) -> dict[str, admin_pb2.WorkerStatus]:
    """Living workers of a role that have not been asked to leave."""
    return {
        worker.worker_id: worker
        for worker in status.workers
        if role_of(worker) == role and worker.state not in (*GONE, *LEAVING)
    }
