"""Meeting of a node with node 0: it waits until node 0 has started in the same directory.

job.json there? ──no──► node 0's port answers for SHARED_S? ──► error: the directory is not shared
     │ yes
answers? ──no──► wait on     refuses? ──► error about the token
     │ yes
agrees? ──no──► error
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.config.load import load_config
from paceline.config.schema import Config
from paceline.errors import BadInput, Unreachable
from paceline.observe.event_follower import leader_status
from paceline.rpc.auth import TOKEN_VARIABLE, read_token
from paceline.rpc.client import ControlPlane, ControlPlaneUnavailable, RequestRefused
from paceline_launcher.launch.job import NodeJob, read_job
from paceline_launcher.launch.node_environment import NodePlace

SAY_S = 10.0  # between two lines about the wait
SHARED_S = 20.0
"""Node 0 answers, but its file is not there after this time: network file systems show it later."""
LOOK_S = 0.5
ASK_LIMIT_S = 2.0
CONNECT_LIMIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Met:
    """Node 0 as it has answered."""

    job: NodeJob
    config: Config  # the configuration that node 0's processes read
    config_path: Path
    control: ControlPlane


@dataclass(eq=False)
class Meeting:
    """``own``: the job that this node was started for. ``wait_s``: node 0 may be silent so long."""

    place: NodePlace
    run_dir: Path
    own: NodeJob
    wait_s: float
    note: Callable[[str], None]

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._answered: float | None = None
        """Since when node 0's port answers although there is no file of node 0."""

    async def meet(self) -> Met:
        """Raises BadInput if this node does not fit node 0, Unreachable after ``wait_s``
        seconds."""
        node_0, noted_s = f"{self.place.master}:{self.place.port}", -SAY_S
        while True:
            result = await self._try(node_0)
            if isinstance(result, Met):
                return result
            waited = time.monotonic() - self._began
            if waited >= self.wait_s:
                raise Unreachable(
                    f"node 0 at {node_0} has not started within {self.wait_s:g} s (--wait): "
                    f"{result}. Start `paceline node` on node 0, and check MASTER_ADDR, "
                    "MASTER_PORT and its log"
                )
            if waited - noted_s >= SAY_S:
                noted_s = waited
                times = f"{waited:.0f} of {self.wait_s:g} s"
                self.note(f"waiting for node 0 at {node_0} ({times}): {result}")
            await asyncio.sleep(LOOK_S)

    async def _try(self, node_0: str) -> Met | str:
        """Node 0, or the reason why it cannot be joined yet."""
        job = await asyncio.to_thread(read_job, self.run_dir)
        if job is None:
            await self._check_shared(node_0)
            return f"it has written nothing to {self.run_dir} yet"
        path = self.run_dir / "config.toml"
        if not path.is_file():
            return f"{path} is not there yet"
        config = load_config(path, stored=True)
        if read_token(config.auth, self.run_dir) is None:
            raise BadInput(
                f"this node has no token for node 0: {TOKEN_VARIABLE} is not set here, and there "
                f"is no {self.run_dir / 'token'}. Set {TOKEN_VARIABLE} on every node to the value "
                "that node 0 has, or auth.token_file to a file that all nodes can read"
            )
        control = ControlPlane.from_config(config, job.addresses, self.run_dir)
        met = Met(job, config, path, control)
        try:
            return await self._answer(met)
        except BaseException:
            await control.close()
            raise

    async def _answer(self, met: Met) -> Met | str:
        try:
            await leader_status(met.control, ASK_LIMIT_S)
        except ControlPlaneUnavailable:
            await met.control.close()
            return "its controllers do not answer yet"
        except RequestRefused as error:
            if error.code != "UNAUTHENTICATED":
                raise
            raise BadInput(
                f"node 0 refuses this node's token: give every node the same {TOKEN_VARIABLE}, or "
                f"none, so that all read {self.run_dir / 'token'}"
            ) from None
        # The file of an earlier session says nothing; that of one that answers does.
        if problem := met.job.problem(self.own):
            raise BadInput(
                f"{problem}. Give `paceline node` the same arguments on every node, and start all "
                "of them anew"
            )
        return met

    async def _check_shared(self, node_0: str) -> None:
        """Raises BadInput if node 0 runs, but writes to another directory."""
        if not await answers(self.place.master, self.place.port):
            self._answered = None
            return
        now = time.monotonic()
        self._answered = now if self._answered is None else self._answered
        if now - self._answered >= SHARED_S:
            raise BadInput(
                f"node 0 answers at {node_0}, but it has written nothing to {self.run_dir}: the "
                "run directory has to be one directory that all nodes share, because checkpoints "
                "are in it. Give --run-dir a path on a shared file system, the same on every node"
            )


async def answers(host: str, port: int) -> bool:
    """True if something listens there."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(CONNECT_LIMIT_S):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
            return True
    return False
