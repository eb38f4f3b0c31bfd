"""Reports of a launcher to the controllers: what its processes have ended of, and which are
stopped.

looks at a process, twice a second ──► stopped ──► ReportFault
its end ──► verdict of the evidence ──► ReportExit of a worker, ReportFault of a controller or Redis
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.observe.fleet_file import ProcessId
from paceline.observe.vocabulary import FaultCause
from paceline.rpc.client import ControlPlane, ControlPlaneUnavailable, RequestRefused
from paceline.v1 import admin_pb2
from paceline_launcher.launch.child import UNSEEN, Child, until_gone
from paceline_launcher.launch.evidence import Finding, Witness, end_in_log

LOOK_S = 0.4
LIMIT_S = 60.0
"""All controllers may be gone, or wait for Redis. A report that is slower than a worker's lease
explains its death."""
REDIS = "redis"


@dataclass(eq=False)
class FaultReports:
    """Reports are repeated for a while if the controllers are away."""

    control: ControlPlane

    def __post_init__(self) -> None:
        self._witnesses: dict[int, Witness] = {}  # by process id
        self._sending: set[asyncio.Task[None]] = set()
        self._host = socket.gethostname()

    async def await_end(self, child: Child) -> int:
        """Exit status of ``child``, which is looked at meanwhile."""
        ended = asyncio.create_task(child.wait())
        await self._watch(child.spec.name, child.pid, ended)
        return ended.result()

    async def await_redis(self, identity: ProcessId, log: Path) -> None:
        """Returns once that server, which writes ``log``, has ended, and reports it."""
        ended = asyncio.create_task(until_gone(identity))
        await self._watch(REDIS, identity.pid, ended)
        self._send(self._report_redis(identity.pid, _status_of(identity.pid), log))

    async def report_exit(self, child: Child, code: int) -> None:
        """Reports a dead worker; if it had not registered yet, its end is a fault all the same."""
        finding = await self._verdict(child.pid, code, ours=child.signalled)
        report = admin_pb2.ExitReport(worker_id=child.spec.name, exit_code=code)
        await self._ask("ReportExit", report, child.pid, finding)

    async def report_end(self, child: Child, code: int) -> None:
        finding = await self._verdict(child.pid, code, ours=child.signalled)
        await self._report(child.spec.name, child.pid, finding)

    async def close(self) -> None:
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)

    async def _watch(self, name: str, pid: int, ended: asyncio.Task[Any]) -> None:
        witness = self._witnesses[pid] = Witness(pid)
        try:
            while not ended.done():
                await asyncio.wait({ended}, timeout=LOOK_S)
                if not ended.done() and (finding := witness.look()) is not None:
                    self._send(self._report(name, pid, finding))
        finally:
            ended.cancel()

    async def _report_redis(self, pid: int, code: int, log: Path) -> None:
        finding = await self._verdict(pid, code, ours=False)
        if finding.cause is FaultCause.UNATTRIBUTED:
            in_log = await asyncio.to_thread(end_in_log, log, pid)
            finding = in_log or finding
        await self._report(REDIS, pid, finding)

    async def _verdict(self, pid: int, code: int, *, ours: bool) -> Finding:
        witness = self._witnesses.pop(pid, None) or Witness(pid)
        return await asyncio.to_thread(witness.verdict, code, ours=ours)

    async def _report(self, name: str, pid: int, finding: Finding) -> None:
        report = admin_pb2.FaultReport(request_id=uuid.uuid4().hex, name=name)
        await self._ask("ReportFault", report, pid, finding)

    async def _ask(
        self,
        method: str,
        report: admin_pb2.ExitReport | admin_pb2.FaultReport,
        pid: int,
        finding: Finding,
    ) -> None:
        report.pid, report.host = pid, self._host
        report.cause, report.detail = finding.cause, finding.detail
        with contextlib.suppress(ControlPlaneUnavailable, RequestRefused):
            await self.control.call(f"AdminService.{method}", report, timeout_s=LIMIT_S)

    def _send(self, report: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(report)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)


def _status_of(pid: int) -> int:
    """Exit code of a child that nobody has reaped yet; UNSEEN if it is not to be had."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        ended = None
    if ended is None:
        return UNSEEN
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
