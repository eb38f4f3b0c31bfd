"""Leases tasks ahead of the engine.

    wake ──► may lease? ──► how many? ──► LeaseTasks (held by the controller while nothing is
      ▲      (directive,    (appetite)        admissible) ──► each lease starts its producer
      │       weights)
      └── a task has left the engine, new weights are loaded, a directive came

One request is open at a time. It is made anew, with the same sequence number, when newer weights are
loaded while it waits: the ledger gives a number its tasks once, so none can get lost in between.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from paceline.rpc.client import RequestRefused
from paceline.rpc.refusal_code import RefusalCode
from paceline.v1 import common_pb2, rollout_pb2

WAIT_S = 10.0
"""How long the controller may hold a request."""
_AT_ONCE_S = 0.25
"""An answer later than this was waited for, not travelled."""
_OVER = (RefusalCode.FENCED.grpc_status, RefusalCode.UNKNOWN.grpc_status)
"""This incarnation is over; or unknown, where Redis has lost its registration in a failover."""
_PAUSE_S = 0.05
"""Between an answer without tasks that came at once and the next request."""


class LeaseLoop:
    """``open_for()``: whether tasks may be leased now. ``wanted(round_trip_s)``: how many.
    ``version()``: what the engine serves. ``take(lease)``: called for each, at once."""

    def __init__(
        self,
        call: Callable[[str, Any], Any],
        *,
        caller: Callable[[], common_pb2.Caller],
        open_for: Callable[[], bool],
        wanted: Callable[[float], int],
        version: Callable[[], int],
        take: Callable[[rollout_pb2.Lease], None],
    ) -> None:
        self._call = call
        self._caller = caller
        self._open_for = open_for
        self._wanted = wanted
        self._version = version
        self._take = take
        self._awake = asyncio.Event()
        self._seq = 1
        self.round_trip_s = 0.01
        """Moving average over calls that found tasks at once. Seconds."""
        self.starved: rollout_pb2.EmptyReason = rollout_pb2.EMPTY_REASON_UNSPECIFIED
        """Why the newest answer had no tasks; unspecified where it had some."""

    def wake(self) -> None:
        """Something changed that may allow or call for more tasks."""
        self._awake.set()

    async def run(self) -> None:
        while True:
            self._awake.clear()
            count = self._wanted(self.round_trip_s) if self._open_for() else 0
            if count <= 0:
                await self._awake.wait()
                continue
            caller = self._caller()
            started = time.monotonic()
            try:
                reply = await self._ask(caller, count)
            except RequestRefused as refused:
                if self._caller() == caller and refused.code not in _OVER:
                    raise
                # The session registers the next incarnation.
                await self._nap()
                continue
            if reply is None:
                continue
            self.starved = reply.empty_reason
            if self._caller() != caller:
                # The tasks of an incarnation that is over are others' by now.
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
                self._take(lease)

    async def _ask(self, caller: common_pb2.Caller, count: int) -> rollout_pb2.LeaseReply | None:
        """None where the request should be made anew."""
        version = self._version()
        asking = asyncio.ensure_future(
            self._call(
                "RolloutService.LeaseTasks",
                rollout_pb2.LeaseRequest(
                    caller=caller,
                    lease_seq=self._seq,
                    max_tasks=count,
                    wait_s=WAIT_S,
                    loaded_version=version,
                ),
            )
        )
        waking: asyncio.Future[Any] = asyncio.ensure_future(self._awake.wait())
        try:
            while True:
                await asyncio.wait({asking, waking}, return_when=asyncio.FIRST_COMPLETED)
                if asking.done():
                    return asking.result()
                if self._version() != version or self._caller() != caller:
                    return None
                self._awake.clear()
                waking = asyncio.ensure_future(self._awake.wait())
        finally:
            asking.cancel()
            waking.cancel()
            await asyncio.gather(asking, waking, return_exceptions=True)

    async def _nap(self) -> None:
        try:
            # Not wait_for: before Python 3.12 it may swallow a cancellation.
            async with asyncio.timeout(_PAUSE_S):
                await self._awake.wait()
        except TimeoutError:
            pass
