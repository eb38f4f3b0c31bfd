"""One process of the fleet, in a session of its own that ends with it.

A process that is taken over was started by an earlier launcher. It is known by its id and start
time; its exit status is unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from paceline.config.schema import Config
from paceline.observe.fleet_file import ProcessId
from paceline.process.torchrun_environment import without_place
from paceline.process.worker_command import THREAD_VARIABLES
from paceline.rpc.addresses import at, free_ports, is_loopback
from paceline.rpc.listeners import UNIX, socket_path
from paceline.user_code import python_module
from paceline.worker_pools import POLICY, role_of, scorer_of, worker_index, worker_name
from paceline_launcher.launch.node_workers import RANK, replica_of

UNSEEN = -1000  # exit code of an adopted process: the system reports it only to the parent
WATCH_S = 0.05  # between two looks whether a process that is no child runs


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
    process: asyncio.subprocess.Process | None = None  # None: it was taken over
    log_offset: int = 0  # bytes of the log file before the start
    began: float = field(default_factory=time.monotonic)  # or when it was taken over
    worked: bool = False  # the ledger has seen its worker at work
    lost_s: float = 0.0  # for so long the ledger has said that it is dead, and it ran on
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
                nice = os.getpriority(os.PRIO_PROCESS, 0) + spec.nice
                os.setpriority(os.PRIO_PROCESS, process.pid, nice)
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
        return self.identity.alive() if self.process is None else self.process.returncode is None

    async def wait(self) -> int:
        """Exit status, negative for a signal; UNSEEN for one that was taken over. Kills what the
        process left in its session."""
        if self.process is None:
            await until_gone(self.identity)
            code = UNSEEN
        else:
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


async def until_gone(identity: ProcessId) -> None:
    """Returns once that very process, ours or not, has ended."""
    while identity.alive():  # noqa: ASYNC110
        await asyncio.sleep(WATCH_S)


async def end_all(children: Sequence[Child], patience_s: float) -> None:
    """SIGTERM, then SIGKILL for what is left after ``patience_s``. Returns when all have ended."""
    for child in children:
        child.terminate()
    waits = [asyncio.create_task(child.wait()) for child in children]
    if not waits:
        return
    await asyncio.wait(waits, timeout=patience_s)
    for child in children:
        if child.running:
            child.kill()
    await asyncio.wait(waits)


CONTROLLER = "controller"  # Role of a process that is no worker. The role of a worker is its pool.
WORKER_NICE = 5


@dataclass(frozen=True, slots=True)
class ChildSpecs:
    config: Config
    config_path: Path
    run_dir: Path
    ports: list[int]
    """Ports of the controllers."""
    master: str = ""
    """Address of node 0, under which every node reaches the controllers; empty: there is one
    node."""

    @property
    def addresses(self) -> list[str]:
        bound = self.config.controller.host
        host = self.master or ("127.0.0.1" if bound in ("0.0.0.0", "::") else bound)
        return [
            at(host, port)
            if port
            else f"{UNIX}{socket_path(self.run_dir, f'{CONTROLLER}-{index}')}"
            for index, port in enumerate(self.ports)
        ]

    def controller(self, index: int) -> ChildSpec:
        arguments = ["--port", str(self.ports[index])]
        if self.master:
            arguments += ["--advertise", self.master]
        spec = self._spec(f"{CONTROLLER}-{index}", CONTROLLER, CONTROLLER, arguments)
        return replace(spec, address=self.addresses[index])

    def worker(self, pool: str, index: int) -> ChildSpec:
        arguments = ["--controllers", ",".join(self.addresses)]
        if scorer := scorer_of(pool):
            arguments += ["--scorer", scorer]
        spec = self._spec(worker_name(pool, index), pool, f"{role_of(pool)}_worker", arguments)
        return replace(spec, nice=WORKER_NICE)

    def rank(self, name: str) -> ChildSpec:
        """Spec of a rank above 0, which has the command line of its replica."""
        spec = self.worker(POLICY, worker_index(replica_of(name)))
        return replace(spec, name=name, role=RANK, log=spec.log.with_name(f"{name}.log"))

    def _spec(self, name: str, role: str, module: str, arguments: Sequence[str]) -> ChildSpec:
        common = ("--run-dir", str(self.run_dir), "--id", name)
        # Processes that each use a thread pool of all cores slow one another down. Workers replace
        # these numbers by those of the configuration.
        pinned = dict.fromkeys(THREAD_VARIABLES, "1")
        output = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
        return ChildSpec(
            name=name,
            role=role,
            argv=(*python_module(module), str(self.config_path), *common, *arguments),
            environment={**without_place(os.environ), **pinned, **output},
            log=self.run_dir / "logs" / f"{name}.log",
        )


def controller_ports(config: Config) -> list[int]:
    """The configured port and those after it, or free ones, which a restarted controller keeps. 0:
    a Unix socket, on one machine."""
    first, count = config.controller.port, config.fleet.controllers
    if first:
        return [first + index for index in range(count)]
    if is_loopback(config.controller.host):
        return [0] * count
    return free_ports(config.controller.host, count)
