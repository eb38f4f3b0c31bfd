"""A node other than node 0: it joins the run, keeps its share of the workers, and ends as the run
ends.

    meet node 0 ──► start workers ──► watch ──► outcome of the run ─────────► its exit status
                                        │ ├──► a worker cannot be started ──► 1
                                        │ ├──► node 0 is silent for --wait s ─► 3
                                        │ └──► SIGTERM: workers leave ──────► 130
                                        └ node 0 is silent, or another one: workers wait for it

Every worker that it started has ended before ``run`` returns.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config.load import load_config
from paceline.errors import BadInput, Unreachable
from paceline.observe.fleet_file import FleetRecord
from paceline.observe.run_watcher import leader_status
from paceline.providers.base import AT_WORK
from paceline.rpc.addresses import address_towards, port_of
from paceline.rpc.auth import TOKEN_VARIABLE, read_token
from paceline.rpc.client import ControlPlane, ControlPlaneUnavailable, RequestRefused
from paceline_launcher.launch.child import ChildSpecs
from paceline_launcher.launch.exports import EXPORT_LIMIT_S
from paceline_launcher.launch.fleet import Fleet
from paceline_launcher.launch.job import (
    NodeJob,
    NodePlace,
    node_directory,
    read_job,
    read_outcome,
)
from paceline_launcher.launch.node_workers import NodeWorkers
from paceline_launcher.launch.watch import Interrupts

POLL_S = 0.5
ASK_LIMIT_S = 2.0
PATIENCE_S = 10.0  # between SIGTERM and SIGKILL
STOP_LOOK_S = 3.0
"""Time that a stopped node gives node 0, which may have got the same signal, to stop the whole run
with a checkpoint."""
SAY_S = 10.0  # between two lines about the wait for node 0
INTERRUPTED = 130


@dataclass(eq=False)
class FollowingNode:
    """``own``: the job that this node was started for. ``wait_s``: node 0 may be silent so long."""

    place: NodePlace
    run_dir: Path
    own: NodeJob
    wait_s: float
    note: Callable[[str], None]
    workers: NodeWorkers

    def __post_init__(self) -> None:
        self._heard = time.monotonic()  # when node 0 last answered
        self._phase = ""
        self._session = ""  # newest start of node 0, whose outcome counts

    async def run(self) -> int:
        """Exit status. Raises BadInput or Unreachable if the node cannot join."""
        words = "this node is stopping: its workers leave the run; once more kills them at once"
        self._interrupts = Interrupts(lambda: self.note(words), lambda: None)
        self._interrupts.install()
        meet = asyncio.create_task(self.meet())
        ends: list[asyncio.Future[Any]] = [meet, self._interrupts.first]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not meet.done():
            meet.cancel()
            return INTERRUPTED
        fleet = meet.result()
        try:
            fleet.start_workers()
            self.note(f"joined the run with {', '.join(fleet.worker_names()) or 'no worker'}")
            return await self._watch(fleet)
        finally:
            await fleet.stop_workers(PATIENCE_S)
            await fleet.close()
            await fleet.control.close()

    async def meet(self) -> Fleet:
        """This node's part of the fleet, once node 0 has started in the same directory. Raises
        BadInput if this node does not fit node 0, Unreachable after ``wait_s`` seconds.

        job.json there? ──no──► wait on
             │ yes
        answers? ──no──► wait on     refuses? ──► error about the token
             │ yes
        agrees? ──no──► error"""
        node_0, noted_s = f"{self.place.master}:{self.place.port}", -SAY_S
        began = time.monotonic()
        while True:
            result = await self._joined()
            if isinstance(result, Fleet):
                return result
            waited = time.monotonic() - began
            if waited >= self.wait_s:
                raise Unreachable(
                    f"node 0 at {node_0} has not started within {self.wait_s:g} s (--wait): "
                    f"{result}. Start `paceline node` on node 0, check MASTER_ADDR, MASTER_PORT "
                    "and its log, and give --run-dir the same path on a shared file system"
                )
            if waited - noted_s >= SAY_S:
                noted_s = waited
                times = f"{waited:.0f} of {self.wait_s:g} s"
                self.note(f"waiting for node 0 at {node_0} ({times}): {result}")
            await asyncio.sleep(POLL_S)

    async def _joined(self) -> Fleet | str:
        """The fleet, or the reason why node 0 cannot be joined yet."""
        job = await asyncio.to_thread(read_job, self.run_dir)
        if job is None:
            return f"it has written nothing to {self.run_dir} yet, which all nodes must share"
        path = self.run_dir / "config.toml"
        if not path.is_file():
            return f"{path} is not there yet"
        config = load_config(path)
        if read_token(config.auth, self.run_dir) is None:
            raise BadInput(
                f"this node has no token: set {TOKEN_VARIABLE} on every node to that of node 0, or "
                f"auth.token_file to a file of all nodes; there is no {self.run_dir / 'token'}"
            )
        control = ControlPlane.from_config(config, job.addresses, self.run_dir)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(control.close)
            try:
                await leader_status(control, ASK_LIMIT_S)
            except ControlPlaneUnavailable:
                return "its controllers do not answer yet"
            except RequestRefused as error:
                if error.code != "UNAUTHENTICATED":
                    raise
                raise BadInput(
                    f"node 0 refuses this node's token: give every node the same {TOKEN_VARIABLE}, "
                    f"or none, so that all read {self.run_dir / 'token'}"
                ) from None
            # The file of an earlier session says nothing; that of one that answers does.
            if problem := job.problem(self.own):
                raise BadInput(
                    f"{problem}. Give `paceline node` the same arguments on every node, and start "
                    "all of them anew"
                )
            stack.pop_all()
        self._session, self._heard = job.session, time.monotonic()
        home = node_directory(self.run_dir, self.workers.node)
        ports = [port_of(address) for address in job.addresses]
        return Fleet(
            config,
            ChildSpecs(config, path, self.run_dir, ports, self.place.master),
            home,
            control,
            self.note,
            self.workers,
            # Node 0 reaches this node there, and so do the others.
            address_towards(self.place.master, self.place.port),
            FleetRecord.read(home),
        )

    async def _watch(self, fleet: Fleet) -> int:
        while True:
            if fleet.failed.done():
                self.note(f"error: {fleet.failed.result()}")
                return 1
            if (code := await self._ended(fleet)) is not None:
                return code
            await self._follow_session()
            await self._look(fleet)
            if self._interrupts.first.done():
                return await self._leave(fleet)
            ends: list[asyncio.Future[Any]] = [self._interrupts.first, fleet.failed]
            await asyncio.wait(ends, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)

    async def _ended(self, fleet: Fleet) -> int | None:
        """Exit status of the run once node 0 has told how it has ended: it has waited for those
        workers that had something to save."""
        outcome = await asyncio.to_thread(read_outcome, self.run_dir)
        if outcome is None or outcome.session != self._session:
            return None
        fleet.finished = outcome.status == "finished"
        reason = f" ({outcome.reason})" if outcome.reason else ""
        self.note(f"the run has ended: {outcome.status}{reason}")
        return outcome.exit_code

    async def _follow_session(self) -> None:
        """Raises BadInput if node 0 was started again, and does not fit this node."""
        job = await asyncio.to_thread(read_job, self.run_dir)
        if job is None or job.session == self._session:
            return
        if problem := job.problem(self.own):
            raise BadInput(f"node 0 was started again, and {problem}. Start this node anew")
        self.note("node 0 was started again")
        self._phase, self._session = "", job.session

    async def _look(self, fleet: Fleet) -> bool:
        """Looks at the run once, and acts on it. True if it needs workers. Raises Unreachable if
        node 0 has been silent for too long."""
        try:
            status = await leader_status(fleet.control, ASK_LIMIT_S)
        except ControlPlaneUnavailable:
            ended = self._phase in ("finished", "failed", "suspended")
            limit_s = self.wait_s + (EXPORT_LIMIT_S if ended else 0.0)
            if time.monotonic() - self._heard >= limit_s:
                raise Unreachable(
                    f"node 0 has not answered for {limit_s:g} s (--wait): look at its log. A node "
                    "that is started again joins the run again"
                ) from None
            return False
        except RequestRefused as error:
            raise BadInput(f"node 0 refuses this node: {error.message}") from None
        self._heard, self._phase = time.monotonic(), status.phase
        fleet.finished = status.phase == "finished"
        await fleet.reconcile(status)
        return status.phase in AT_WORK

    async def _leave(self, fleet: Fleet) -> int:
        """This node is taken away, or the whole job is stopped: then node 0 stops the run, and the
        workers end with it."""
        began, second = time.monotonic(), self._interrupts.second
        deadline = began + fleet.config.fleet.stop_s
        while time.monotonic() < deadline and not second.done() and fleet.worker_names():
            if (code := await self._ended(fleet)) is not None:
                return code
            at_work = await self._look(fleet)
            if at_work and not fleet.going and time.monotonic() >= began + STOP_LOOK_S:
                await fleet.leave()
            await asyncio.wait([second], timeout=POLL_S)
        return INTERRUPTED
