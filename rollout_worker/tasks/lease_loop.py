"""Leasing of tasks ahead of the engine.

    wake ──► may lease? ──► how many? ──► LeaseTasks (the controller keeps the request open while
      ▲      (directive,    (tasks_wanted)    no task is admissible) ──► each lease starts a task
      │       weights)
      └── a completion has left the engine, new weights are loaded, a directive came

One request is open at a time. If newer weights are loaded while it waits, it is sent again with the
same sequence number: the ledger gives a number its tasks once, so none can get lost in between.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.errors import RefusalCode
from paceline.process.waits import WaitKind, waiting
from paceline.rpc.client import RequestRefused
from paceline.rpc.session import WorkerSession
from paceline.v1 import common_pb2, rollout_pb2
from rollout_worker.engine.base import Engine

WAIT_S = 10.0  # Longest time the controller may keep a request open
_AT_ONCE_S = 0.25  # A reply that took longer waited for tasks: it says nothing about the round trip
_OVER = (RefusalCode.FENCED.grpc_status, RefusalCode.UNKNOWN.grpc_status)
"""Refusals of an incarnation that is over, or that Redis lost in a failover."""
_PAUSE_S = 0.05  # Between an immediate reply without tasks and the next request
LEAST_AHEAD_S = 0.05
"""Least time that queued work must last: a lease call, a submit call and some scheduling."""


@dataclass
class LeaseLoop:
    session: WorkerSession
    engine: Engine
    room: asyncio.Event  # Set when the worker may want more tasks than before
    tasks_to_lease: Callable[[float], int]  # Takes the round trip in seconds; 0: none now
    take: Callable[[rollout_pb2.Lease], None]  # Must not block
    _seq: int = 1
    round_trip_s: float = 0.01  # Moving average over calls that found tasks at once. Seconds.
    empty_reason: rollout_pb2.EmptyReason = rollout_pb2.EMPTY_REASON_UNSPECIFIED
    """Reason for which the newest reply had no tasks; unspecified if there were some."""

    async def run(self) -> None:
        while True:
            self.room.clear()
            count = self.tasks_to_lease(self.round_trip_s)
            if count <= 0:
                await self.room.wait()
                continue
            caller = self.session.caller
            started = time.monotonic()
            try:
                with waiting(WaitKind.TASKS, "waiting for tasks"):
                    reply = await self._request(caller, count)
            except RequestRefused as refused:
                if self.session.caller == caller and refused.code not in _OVER:
                    raise
                # The session registers the next incarnation.
                await self._nap()
                continue
            if reply is None:
                continue
            self.empty_reason = reply.empty_reason
            if self.session.caller != caller:
                # Tasks of an incarnation that is over belong to other workers by now.
                continue
            if not reply.leases:
                if reply.empty_reason == rollout_pb2.EMPTY_REASON_UNSPECIFIED:
                    # There were some, and the row of each is too large for a message: the same
                    # request would get the same.
                    self._seq += 1
                if time.monotonic() - started < _PAUSE_S:
                    await self._nap()
                continue
            self._seq += 1
            took_s = time.monotonic() - started
            if took_s < _AT_ONCE_S:
                self.round_trip_s += 0.2 * (took_s - self.round_trip_s)
            for lease in reply.leases:
                self.take(lease)

    async def _request(
        self, caller: common_pb2.Caller, count: int
    ) -> rollout_pb2.LeaseReply | None:
        """None if the request has to be sent again."""
        version = self.engine.version
        request = rollout_pb2.LeaseRequest(
            caller=caller,
            lease_seq=self._seq,
            max_tasks=count,
            wait_s=WAIT_S,
            loaded_version=version,
        )
        call: asyncio.Future[rollout_pb2.LeaseReply] = asyncio.ensure_future(
            self.session.call("RolloutService.LeaseTasks", request)
        )
        woken: asyncio.Future[Any] = asyncio.ensure_future(self.room.wait())
        try:
            while True:
                await asyncio.wait({call, woken}, return_when=asyncio.FIRST_COMPLETED)
                if call.done():
                    return call.result()
                if self.engine.version != version or self.session.caller != caller:
                    return None
                self.room.clear()
                woken = asyncio.ensure_future(self.room.wait())
        finally:
            call.cancel()
            woken.cancel()
            await asyncio.gather(call, woken, return_exceptions=True)

    async def _nap(self) -> None:
        # Not wait_for: before Python 3.12 it may swallow a cancellation.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PAUSE_S):
                await self.room.wait()


def tasks_wanted(
    *,
    slots: int,
    group_size: int,
    generating: int,
    sequences_per_s: float,
    round_trip_s: float,
    unsent: int,
) -> int:
    """Tasks to ask for; 0: enough is at hand. ``generating``: unfinished sequences;
    ``sequences_per_s``: measured, 0 while unknown; ``round_trip_s``: of a lease call that found
    tasks; ``unsent``: groups the controller has not taken yet. Besides the slots, work for two
    round trips is queued. A small shortfall of the queue may grow, because one call for several
    tasks costs as much as one for one; a free slot is filled."""
    ahead_s = max(2 * round_trip_s, LEAST_AHEAD_S)
    ahead = min(max(slots // 8, math.ceil(sequences_per_s * ahead_s)), slots)
    target = slots + ahead
    if unsent * group_size > 2 * target:
        # The controller takes no groups: more work would only pile up.
        return 0
    short = target - generating
    if short <= 0 or (generating >= slots and short < max(group_size, ahead // 2)):
        return 0
    return min(math.ceil(short / group_size), 256)
