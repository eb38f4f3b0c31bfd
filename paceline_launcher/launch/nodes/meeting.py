"""Meeting of a node with node 0: it waits until node 0 has started in the same directory and
answers.

job.json there?  ──no──►  does node 0's port answer?  ──yes, for SHARED_S──►  the directory is not
shared
     │ yes
     ▼
agrees?  ──no──►  error           answers?  ──no──►  wait on         refuses?  ──►  error about the token
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
from paceline_launcher.launch.node_environment import NodePlace
from paceline_launcher.launch.nodes.job_file import NodeJob, read_job

SAY_S = 10.0
"""Between two lines about the wait."""
SHARED_S = 20.0
"""Node 0 answers, but its file is not there after this time: network file systems show it later."""
LOOK_S = 0.5
ASK_LIMIT_S = 2.0
CONNECT_LIMIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Met:
    """Node 0 as it has answered."""

    job: NodeJob
    config: Config
    """As node 0's processes read it."""
    config_path: Path
    control: ControlPlane


@dataclass(eq=False)
class Meeting:
    """``own``: what this node was started with."""

    place: NodePlace
    run_dir: Path
    own: NodeJob
    wait_s: float
    note: Callable[[str], None]

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._said = -SAY_S
        self._answered: float | None = None
        """Since when node 0's port answers although there is no file of node 0."""

    async def meet(self) -> Met:
        """Raises BadInput if this node does not fit node 0, and Unreachable after ``wait_s``
        seconds."""
        while True:
            why, met = await self._try()
            if met is not None:
                return met
            waited = time.monotonic() - self._began
            if waited >= self.wait_s:
                raise Unreachable(
                    f"node 0 at {self._node_0} has not started within {self.wait_s:g} s (--wait): {why}. Start `paceline node` on "
                    "node 0, and check MASTER_ADDR, MASTER_PORT and its log"
                )
            if waited - self._said >= SAY_S:
                self._said = waited
                self.note(
                    f"waiting for node 0 at {self._node_0} ({waited:.0f} of {self.wait_s:g} s): {why}"
                )
            await asyncio.sleep(LOOK_S)

    @property
    def _node_0(self) -> str:
        return f"{self.place.master}:{self.place.port}"

    async def _try(self) -> tuple[str, Met | None]:
        """Why node 0 cannot be joined yet, or node 0."""
        job = await asyncio.to_thread(read_job, self.run_dir)
        if job is None:
            await self._check_shared()
            return f"it has written nothing to {self.run_dir} yet", None
        path = self.run_dir / "config.toml"
        if not path.is_file():
            return f"{path} is not there yet", None
        config = load_config(path)
        control = self._control_plane(config, job)
        try:
            await leader_status(control, ASK_LIMIT_S)
        except ControlPlaneUnavailable:
            await control.close()
            return "its controllers do not answer yet", None
        except RequestRefused as error:
            await control.close()
            if error.code == "UNAUTHENTICATED":
                raise BadInput(
                    f"node 0 refuses this node's token: give every node the same {TOKEN_VARIABLE}, or none, so that all read "
                    f"{self.run_dir / 'token'}"
                ) from None
            raise
        # The file of an earlier session says nothing; that of one that answers does.
        if problem := job.problem(self.own):
            await control.close()
            raise BadInput(
                f"{problem}. Give `paceline node` the same arguments on every node, and start all of them anew"
            )
        return "", Met(job, config, path, control)

    def _control_plane(self, config: Config, job: NodeJob) -> ControlPlane:
        if read_token(config.auth, self.run_dir) is None:
            raise BadInput(
                f"this node has no token for node 0: {TOKEN_VARIABLE} is not set here, and there is no {self.run_dir / 'token'}. "
                f"Set {TOKEN_VARIABLE} on every node to the value that node 0 has, or auth.token_file to a file that all nodes "
                "can read"
            )
        return ControlPlane.from_config(config, job.addresses, self.run_dir)

    async def _check_shared(self) -> None:
        """Raises BadInput if node 0 runs, but writes to another directory."""
        if not await answers(self.place.master, self.place.port):
            self._answered = None
            return
        now = time.monotonic()
        self._answered = now if self._answered is None else self._answered
        if now - self._answered >= SHARED_S:
            raise BadInput(
                f"node 0 answers at {self._node_0}, but it has written nothing to {self.run_dir}: the run directory has to be "
                "one directory that all nodes share, because checkpoints are in it. Give --run-dir a path on a shared file "
                "system, the same on every node"
            )


async def answers(host: str, port: int) -> bool:
    """Whether something listens there."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(CONNECT_LIMIT_S):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
            return True
    return False
