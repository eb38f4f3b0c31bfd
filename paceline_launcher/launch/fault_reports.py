"""Reports of a launcher to the controllers: what its processes have ended of, and which are
stopped, with evidence about each.

Most evidence is gone once a process has ended, so that it is looked at while it runs: the count of
the kernel's kills in its control group before, and whether it was stopped.

looks at a process, twice a second ──► stopped ──► ReportFault
its end ──► verdict of the evidence ──► ReportExit of a worker, ReportFault of a controller or Redis
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
import uuid
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from paceline.observe.fleet_file import ProcessId
from paceline.observe.vocabulary import FaultCause
from paceline.process.kernel_state import KernelState, kernel_state
from paceline.process.memory_kills import (
    MemoryKills,
    control_groups,
    count_again,
    memory_kills,
)
from paceline.rpc.addresses import host_name
from paceline.rpc.client import ControlPlane, ControlPlaneUnavailable, RequestRefused
from paceline.v1 import admin_pb2
from paceline_launcher.launch.child import UNSEEN, Child, how_ended, until_gone

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
        self._host = host_name()

    async def await_end(self, child: Child) -> int:
        """Exit status of ``child``, which is looked at meanwhile."""
        ended = asyncio.create_task(child.wait())
        await self._watch(child.spec.name, child.pid, ended)
        return ended.result()

    async def await_redis(self, identity: ProcessId) -> None:
        """Returns once that server has ended, and reports it."""
        ended = asyncio.create_task(until_gone(identity))
        await self._watch(REDIS, identity.pid, ended)
        self.send(self._report_redis(identity.pid, _status_of(identity.pid)))

    async def report_exit(self, child: Child, code: int) -> None:
        """Reports a dead worker; if it had not registered yet, its end is a fault all the same."""
        finding = await self._verdict(child.pid, code, ours=child.signalled)
        report = admin_pb2.ExitReport(worker_id=child.spec.name, exit_code=code)
        await self._ask("ReportExit", report, child.pid, finding)

    async def report_end(self, child: Child, code: int) -> None:
        finding = await self._verdict(child.pid, code, ours=child.signalled)
        await self._report(child.spec.name, child.pid, finding)

    def send(self, report: Coroutine[Any, Any, None]) -> None:
        """Runs a report without waiting for it."""
        task = asyncio.create_task(report)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    def cancel(self) -> None:
        for task in self._sending:
            task.cancel()

    async def settle(self, limit_s: float) -> None:
        """Returns once every report has been sent, or after ``limit_s``."""
        if self._sending:
            await asyncio.wait(self._sending, timeout=limit_s)

    async def _watch(self, name: str, pid: int, ended: asyncio.Task[Any]) -> None:
        witness = self._witnesses[pid] = Witness(pid)
        try:
            while not ended.done():
                await asyncio.wait({ended}, timeout=LOOK_S)
                if not ended.done() and (finding := witness.look()) is not None:
                    self.send(self._report(name, pid, finding))
        finally:
            ended.cancel()

    async def _report_redis(self, pid: int, code: int) -> None:
        await self._report(REDIS, pid, await self._verdict(pid, code, ours=False))

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


def _status_of(pid: int) -> int:
    """Exit code of a child that nobody has reaped yet; UNSEEN if it is not to be had."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        ended = None
    if ended is None:
        return UNSEEN
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


BEFORE_S = 5.0
"""A replica ends a moment after one of its ranks was killed: kills of that time count."""
COUNT_S = 2.0
"""Counts of a process that stays in its group are taken no more often: each reads a file for every
group up to the mount."""
STOPPED_LOOKS = 2
"""A process that is stopped in so many looks in a row: a debugger stops it for less."""
CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP}
)
DEAD = ("Z", "X")  # states of a process that has ended and was not reaped
REMEDY = "give it more memory, or see `paceline plan memory` for what to lower"


@dataclass(frozen=True, slots=True)
class Finding:
    cause: FaultCause
    detail: str


@dataclass(eq=False)
class Witness:
    """Looks at one process; ``pid`` is that very process as long as its launcher has not reaped
    it."""

    pid: int
    count: Callable[[int], MemoryKills | None] = memory_kills
    again: Callable[[MemoryKills], MemoryKills] = count_again
    state: Callable[[int], KernelState | None] = kernel_state
    clock: Callable[[], float] = time.monotonic
    groups: Callable[[int], str] = control_groups
    _groups: str = ""  # at the last count
    _before: deque[tuple[float, MemoryKills]] = field(default_factory=deque)
    """Counts with their times: the newest that is older than BEFORE_S, and all since."""
    _stopped: int = 0  # looks in a row in which it was stopped

    def __post_init__(self) -> None:
        self._groups = self.groups(self.pid)
        self._note(self.count(self.pid))

    def look(self) -> Finding | None:
        """Called every now and then. A finding once for each time that the process is stopped."""
        state = self.state(self.pid)
        if state is None or state.letter in DEAD:
            return None  # the kernel has taken it out of its group
        groups = self.groups(self.pid)
        due = not self._before or self.clock() >= self._before[-1][0] + COUNT_S
        if due or groups != self._groups:
            self._groups = groups
            self._note(self.count(self.pid))
        self._stopped = self._stopped + 1 if state.stopped else 0
        if self._stopped != STOPPED_LOOKS:
            return None
        return Finding(
            FaultCause.STOPPED, f"{state.words}; continue it with: kill -CONT {self.pid}"
        )

    def verdict(self, exit_code: int, *, ours: bool = False) -> Finding:
        """Cause of its end. ``exit_code``: negative for a signal. ``ours``: its launcher has
        sent it a signal."""
        how = how_ended(exit_code)
        if exit_code == 0:
            return Finding(FaultCause.ASKED_TO_LEAVE, how)
        if ours:
            return Finding(FaultCause.ASKED_TO_LEAVE, f"ended by its launcher, {how}")
        if killed := self._killed_for_memory(exit_code):
            return Finding(FaultCause.OUT_OF_MEMORY, f"{how}: {killed}; {REMEDY}")
        if exit_code == UNSEEN:
            return Finding(FaultCause.UNATTRIBUTED, how)
        if exit_code > 0:
            return Finding(FaultCause.ERROR, how)
        return Finding(FaultCause.CRASHED if -exit_code in CRASHES else FaultCause.KILLED, how)

    def _killed_for_memory(self, exit_code: int) -> str:
        """In words; empty if nothing says so."""
        if not self._before or (exit_code < 0 and exit_code not in (-signal.SIGKILL, UNSEEN)):
            return ""
        now = self.again(self._before[-1][1])
        if now.kills <= self._before[0][1].kills:
            return ""
        return f"killed by the kernel for lack of memory: {now.words}"

    def _note(self, counted: MemoryKills | None) -> None:
        if counted is None:
            return
        now = self.clock()
        if self._before and self._before[-1][1].cgroup != counted.cgroup:
            self._before.clear()  # somebody has moved it
        self._before.append((now, counted))
        while len(self._before) > 1 and self._before[1][0] <= now - BEFORE_S:
            self._before.popleft()
