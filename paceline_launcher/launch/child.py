"""One process of the fleet, in a session of its own that ends with it.

An ``Adopted`` process was started by an earlier supervisor. It is known by its id and start time
and awaited through a process descriptor; its exit status is unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from paceline.observe.fleet_file import ProcessId
from paceline.process.lifetime import age_s

UNSEEN = -1000  # exit code of an adopted process: the system reports it only to the parent
WATCH_S = 0.1  # poll interval for an adopted process on a system without process descriptors


def how_ended(code: int) -> str:
    """``code``: exit status, negative for a signal."""
    if code == UNSEEN:
        return "exit status unknown"
    return f"exit status {code}" if code >= 0 else f"signal {-code}"


@dataclass(frozen=True, slots=True)
class ChildSpec:
    name: str
    role: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path
    nice: int = 0  # added to the priority value: workers yield to the control plane on busy cores
    address: str = ""


@dataclass(eq=False)
class Child:
    """A running process. Its own session: a terminal's Ctrl-C reaches only the supervisor."""

    spec: ChildSpec
    identity: ProcessId
    process: asyncio.subprocess.Process | None = None
    log_offset: int = 0  # bytes of the log file before the start
    began: float = field(default_factory=time.monotonic)
    signalled: bool = False

    @classmethod
    async def start(cls, spec: ChildSpec) -> Child:
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        with spec.log.open("ab") as log:
            offset = log.tell()
            process = await asyncio.create_subprocess_exec(
                *spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(spec.environment),
                start_new_session=True,
            )
        if spec.nice:
            # Right after the start: threads inherit the priority of the thread that makes them.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, process.pid, spec.nice)
        try:
            identity = ProcessId.of(process.pid)
        except psutil.Error:
            # It has ended and been reaped already; its exit status says why.
            identity = ProcessId(process.pid, 0.0)
        return cls(spec, identity, process, offset)

    @property
    def pid(self) -> int:
        return self.identity.pid

    @property
    def running(self) -> bool:
        assert self.process is not None
        return self.process.returncode is None

    async def wait(self) -> int:
        """Exit status, negative for a signal. Kills what the process left in its session."""
        assert self.process is not None
        code = await self.process.wait()
        self.kill()
        return code

    def terminate(self) -> None:
        # It may have been reaped before the event loop notices: its id is then free.
        if self.running and self.identity.alive():
            self.signalled = True
            # Only the process: it ends its own ranks and pools in order.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Ends the process and everything in its session, at once."""
        self.signalled = self.signalled or self.running
        # The group's id is the process's own and stays taken while a member of the group lives.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def last_line(self) -> str:
        """Last line that the process has written since its start; empty if there is none."""
        try:
            with self.spec.log.open("rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(self.log_offset, log.tell() - 65536))
                lines = [line for line in log.read().decode(errors="replace").splitlines() if line]
        except OSError:
            return ""
        return lines[-1].strip() if lines else ""


class Adopted(Child):
    def __init__(self, spec: ChildSpec, identity: ProcessId) -> None:
        super().__init__(spec, identity)
        self.began -= age_s(identity.started)

    @property
    def running(self) -> bool:
        return self.identity.alive()

    async def wait(self) -> int:
        """Always UNSEEN. Kills what the process left in its session."""
        await until_gone(self.identity)
        self.kill()
        return UNSEEN


async def until_gone(identity: ProcessId) -> None:
    """Returns once that very process, ours or not, has ended."""
    try:
        descriptor = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return
    except OSError:
        while identity.alive():  # noqa: ASYNC110
            # Nothing to await: this system has no process descriptors.
            await asyncio.sleep(WATCH_S)
        return
    gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(descriptor, gone.set)
    try:
        # The id may have been reused before the descriptor was there.
        if identity.alive():
            await gone.wait()
    finally:
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)


async def end_all(children: Sequence[Child], patience_s: float) -> None:
    """SIGTERM, then SIGKILL for what is left after ``patience_s``. Returns when all have ended."""
    for child in children:
        child.terminate()
    waits = [asyncio.create_task(child.wait()) for child in children]
    if not waits:
        return
    _, late = await asyncio.wait(waits, timeout=patience_s)
    if late:
        for child in children:
            if child.running:
                child.kill()
        await asyncio.wait(late)
