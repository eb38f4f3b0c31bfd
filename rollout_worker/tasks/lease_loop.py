"""Leases tasks ahead of the engine.

    wake ──► may lease? ──► how many? ──► LeaseTasks (the controller keeps the request open while
      ▲      (directive,    (lease_sizing)    no task is admissible) ──► each lease starts a task
      │       weights)
      └── a completion has left the engine, new weights are loaded, a directive came

One request is open at a time. If newer weights are loaded while it waits, it is sent again with the
same sequence number: the ledger gives a number its tasks once, so none can get lost in between.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol

from paceline.refusal_code import RefusalCode
from paceline.rpc.client import RequestRefused
from paceline.rpc.session import WorkerSession
from paceline.v1 import common_pb2, rollout_pb2

WAIT_S = 10.0
"""Longest time the controller may keep a request open."""
_AT_ONCE_S = 0.25
"""A reply that took longer than this had to wait for tasks: it says nothing about the round trip."""
_OVER = (RefusalCode.FENCED.grpc_status, RefusalCode.UNKNOWN.grpc_status)
"""This incarnation is over; or unknown, if Redis lost its registration in a failover."""
_PAUSE_S = 0.05
"""Between an immediate reply without tasks and the next request."""


class LeaseTaker(Protocol):
    """The worker, as the lease loop needs it."""

    @property
    def loaded_version(self) -> int: ...

    def tasks_to_lease(self, round_trip_s: float) -> int:
        """0: none now."""

    def take(self, lease: rollout_pb2.Lease) -> None:
        """Must not block."""


class LeaseLoop:
    """``room``: set when the worker may want more tasks than before."""

    def __init__(self, session: WorkerSession, worker: LeaseTaker, room: asyncio.Event) -> None:
        self._session = session
        self._worker = worker
        self._room = room
        self._seq = 1
        self.round_trip_s = 0.01
        """Moving average over calls that found tasks at once. Seconds."""
        self.empty_reason: rollout_pb2.EmptyReason = rollout_pb2.EMPTY_REASON_UNSPECIFIED
        """Why the newest reply had no tasks; unspecified if it had some."""

    async def run(self) -> None:
        while True:
            self._room.clear()
            count = self._worker.tasks_to_lease(self.round_trip_s)
            if count <= 0:
                await self._room.wait()
                continue
            caller = self._session.caller
            started = time.monotonic()
            try:
                reply = await self._request(caller, count)
            except RequestRefused as refused:
                if self._session.caller == caller and refused.code not in _OVER:
                    raise
                # The session registers the next incarnation.
                await self._nap()
                continue
            if reply is None:
                continue
            self.empty_reason = reply.empty_reason
            if self._session.caller != caller:
                # Tasks of an incarnation that is over belong to other workers by now.
                continue
            if not reply.leases:
                if time.monotonic() - started < _PAUSE_S:
                    await self._nap()
                continue
            self._seq += 1
            took_s = time.monotonic() - started
            if took_s < _AT_ONCE_S:
                self.round_trip_s += 0.2 * (took_s - self.round_trip_s)
            for lease in reply.leases:
                self._worker.take(lease)

    async def _request(
        self, caller: common_pb2.Caller, count: int
    ) -> rollout_pb2.LeaseReply | None:
        """None if the request has to be sent again."""
        version = self._worker.loaded_version
        request = rollout_pb2.LeaseRequest(
            caller=caller,
            lease_seq=self._seq,
            max_tasks=count,
            wait_s=WAIT_S,
            loaded_version=version,
        )
        call: asyncio.Future[rollout_pb2.LeaseReply] = asyncio.ensure_future(
            self._session.call("RolloutService.LeaseTasks", request)
        )
        woken: asyncio.Future[Any] = asyncio.ensure_future(self._room.wait())
        try:
            while True:
                await asyncio.wait({call, woken}, return_when=asyncio.FIRST_COMPLETED)
                if call.done():
                    return call.result()
                if self._worker.loaded_version != version or self._session.caller != caller:
                    return None
                self._room.clear()
                woken = asyncio.ensure_future(self._room.wait())
        finally:
            call.cancel()
            woken.cancel()
            await asyncio.gather(call, woken, return_exceptions=True)

    async def _nap(self) -> None:
        try:
            # Not wait_for: before Python 3.12 it may swallow a cancellation.
            async with asyncio.timeout(_PAUSE_S):
                await self._room.wait()
        except TimeoutError:
            pass
