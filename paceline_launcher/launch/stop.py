"""Stop of a run: the signals that ask for it, and its stages within a time limit.

    0 ──────────────► limit / 2 ─────────► limit ─────────► limit + LEDGER_S
    commit the open   leave it; write      stop without     stop without
    step              a checkpoint         a checkpoint     the ledger

The ledger takes these stages as requests of the launcher. It stops the workers once it has
recorded the checkpoint, or at the last stage.
"""

from __future__ import annotations

import asyncio
import signal
import time
import uuid
from collections.abc import Callable

from paceline.rpc.client import ControlPlane, ControlPlaneUnavailable, RequestRefused
from paceline.v1 import admin_pb2

ASK_S = 2.0
LEDGER_S = 10.0
"""After the limit, the ledger has this long to record the stop: an election may be under way."""


class Interrupts:
    """SIGINT, SIGTERM and SIGHUP of this process: the first one asks, the second one insists."""

    def __init__(self, on_first: Callable[[], None], on_second: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[None] = loop.create_future()
        self.second: asyncio.Future[None] = loop.create_future()
        self._calls = on_first, on_second

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self.take)

    def take(self) -> None:
        for future, call in zip((self.first, self.second), self._calls, strict=True):
            if not future.done():
                future.set_result(None)
                call()
                return


class TimedStop:
    """``limit_s``: fleet.stop_s. The time runs from the construction."""

    def __init__(
        self,
        control: ControlPlane,
        limit_s: float,
        *,
        ending: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``ending``: the run is being ended for good, after its open step, already."""
        self._control = control
        self._limit_s = limit_s
        self._clock = clock
        self._began = clock()
        self._id = uuid.uuid4().hex
        self._sent = {admin_pb2.SUSPEND_STAGE_FINISH_STEP} if ending else set()

    @property
    def overdue(self) -> bool:
        """The ledger does not answer in time: the fleet is to be stopped without it."""
        return self._clock() - self._began >= self._limit_s + LEDGER_S

    def stage(self) -> admin_pb2.SuspendStage:
        """The stage that is due now."""
        for_s = self._clock() - self._began
        if for_s >= self._limit_s:
            return admin_pb2.SUSPEND_STAGE_AT_ONCE
        if for_s >= self._limit_s / 2:
            return admin_pb2.SUSPEND_STAGE_LEAVE_STEP
        return admin_pb2.SUSPEND_STAGE_FINISH_STEP

    async def ask(self) -> None:
        """Asks for the stage that is due, until a leader has accepted it."""
        stage = self.stage()
        if stage in self._sent:
            return
        request = admin_pb2.SuspendRequest(
            # One id a stage: a retry over a failover has one effect.
            request_id=f"{self._id}-{stage}",
            reason="paceline up was interrupted",
            stage=stage,
        )
        try:
            await self._control.call("AdminService.Suspend", request, timeout_s=ASK_S)
        except (ControlPlaneUnavailable, RequestRefused):
            return  # the next poll asks again; a run that has ended is seen in its status
        self._sent.add(stage)
