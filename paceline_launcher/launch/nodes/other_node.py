"""A node other than node 0: it joins the run, keeps its share of the workers, and ends as the run
ends.

    meet node 0 ──► start workers ──► watch ──► outcome of the run ────────────────► its exit status
                                        │ ├──► a worker cannot be started ─────────► 1 │ ├──► node 0
                                        is silent for --wait s ──────► 3 │ └──► SIGTERM: workers
                                        leave ─────────────► 130 └ node 0 is silent, or another one:
                                        workers wait, and go on with it

Every worker that it started has ended before ``run`` returns.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import BadInput, Unreachable
from paceline.observe.event_follower import leader_status
from paceline.observe.fleet_file import FleetRecord
from paceline.rpc.addresses import address_towards
from paceline.rpc.client import ControlPlaneUnavailable, RequestRefused
from paceline.v1 import admin_pb2
from paceline_launcher.launch.final_export import LIMIT_S as EXPORT_LIMIT_S
from paceline_launcher.launch.nodes.job_file import (
    RunOutcome,
    node_directory,
    read_job,
    read_outcome,
)
from paceline_launcher.launch.nodes.meeting import Meeting, Met
from paceline_launcher.launch.nodes.node_fleet import NodeFleet
from paceline_launcher.launch.nodes.node_launcher import NodeLauncher, Share

POLL_S = 0.5
ASK_LIMIT_S = 2.0
PATIENCE_S = 10.0
"""Between SIGTERM and SIGKILL."""
STOP_LOOK_S = 3.0
"""Time that a stopped node gives node 0, which may have got the same signal, to stop the whole run
with a checkpoint."""
INTERRUPTED = 130


@dataclass(eq=False)
class OtherNode:
    """``share``: of this node. ``wait_s``: how long node 0 may be silent."""

    meeting: Meeting
    share: Share
    run_dir: Path
    wait_s: float
    note: Callable[[str], None]

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._interrupted: asyncio.Future[None] = loop.create_future()
        self._at_once: asyncio.Future[None] = loop.create_future()
        self._heard = time.monotonic()
        """When node 0 last answered."""
        self._phase = ""

    async def run(self) -> int:
        """Exit status. Raises BadInput or Unreachable if the node cannot join."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        meet = asyncio.create_task(self.meeting.meet())
        ends: list[asyncio.Future[Met] | asyncio.Future[None]] = [meet, self._interrupted]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not meet.done():
            meet.cancel()
            return INTERRUPTED
        met = meet.result()
        home = node_directory(self.run_dir, self.share.node)
        addresses = [int(a.rpartition(":")[2]) for a in met.job.addresses]
        launcher = NodeLauncher(
            met.config,
            met.config_path,
            self.run_dir,
            addresses,
            self.meeting.place.master,
            self.share,
        )
        fleet = NodeFleet(
            met.config,
            launcher,
            home,
            met.control,
            self.note,
            FleetRecord.read(home),
            share=self.share,
            address=self._address(),
        )
        self._heard = time.monotonic()
        try:
            fleet.start_workers()
            self.note(f"joined the run with {', '.join(fleet.workers()) or 'no worker'}")
            return await self._watch(fleet, met)
        finally:
            await fleet.stop_workers(PATIENCE_S)
            await fleet.close()
            await met.control.close()

    def _address(self) -> str:
        """Of this node, as node 0 and therefore the other nodes reach it."""
        place = self.meeting.place
        return address_towards(place.master, place.port)

    def _on_signal(self) -> None:
        if not self._interrupted.done():
            self._interrupted.set_result(None)
            self.note(
                "this node is stopping: its workers leave the run; once more kills them at once"
            )
        elif not self._at_once.done():
            self._at_once.set_result(None)

    async def _watch(self, fleet: NodeFleet, met: Met) -> int:
        session = met.job.session
        while True:
            if fleet.failed.done():
                self.note(f"error: {fleet.failed.result()}")
                return 1
            if (outcome := await self._outcome(session)) is not None:
                return await self._end(fleet, outcome)
            session = await self._session(met, session)
            await self._look(fleet)
            if self._interrupted.done():
                return await self._leave(fleet, session)
            ends: list[asyncio.Future[None] | asyncio.Future[str]]
            ends = [self._interrupted, fleet.failed]
            await asyncio.wait(ends, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)

    async def _outcome(self, session: str) -> RunOutcome | None:
        found = await asyncio.to_thread(read_outcome, self.run_dir)
        return found if found is not None and found.session == session else None

    async def _session(self, met: Met, session: str) -> str:
        """Of the newest start of node 0, whose outcome counts. Raises BadInput if it does not fit
        this node."""
        job = await asyncio.to_thread(read_job, self.run_dir)
        if job is None or job.session == session:
            return session
        if problem := job.problem(self.meeting.own):
            raise BadInput(f"node 0 was started again, and {problem}. Start this node anew")
        self.note("node 0 was started again")
        self._phase = ""
        return job.session

    async def _look(self, fleet: NodeFleet) -> admin_pb2.StatusReply | None:
        """One look at the run, and what follows from it. Raises Unreachable if node 0 has been
        silent for too long."""
        try:
            status = await leader_status(fleet.control, ASK_LIMIT_S)
        except ControlPlaneUnavailable:
            ended = self._phase in ("finished", "failed", "suspended")
            limit_s = self.wait_s + (EXPORT_LIMIT_S if ended else 0.0)
            if time.monotonic() - self._heard >= limit_s:
                raise Unreachable(
                    f"node 0 has not answered for {limit_s:g} s (--wait): look at its log. A node that is started again joins the "
                    "run again"
                ) from None
            return None
        except RequestRefused as error:
            raise BadInput(f"node 0 refuses this node: {error.message}") from None
        self._heard = time.monotonic()
        self._phase = status.phase
        fleet.finished = status.phase == "finished"
        await fleet.reconcile(status)
        return status

    async def _end(self, fleet: NodeFleet, outcome: RunOutcome) -> int:
        """Lets workers end by themselves that are about to; node 0 waited for those that had
        something to save."""
        fleet.finished = outcome.status == "finished"
        self.note(
            f"the run has ended: {outcome.status}"
            + (f" ({outcome.reason})" if outcome.reason else "")
        )
        return outcome.exit_code

    async def _leave(self, fleet: NodeFleet, session: str) -> int:
        """This node is taken away, or the whole job is stopped: then node 0 stops the run, and the
        workers end with it."""
        deadline = time.monotonic() + fleet.config.fleet.stop_s
        ask_at = time.monotonic() + STOP_LOOK_S
        asked = False
        while time.monotonic() < deadline and not self._at_once.done() and fleet.workers():
            if (outcome := await self._outcome(session)) is not None:
                return await self._end(fleet, outcome)
            status = await self._look(fleet)
            running = status is not None and status.phase in ("waiting", "running", "paused")
            if running and not asked and time.monotonic() >= ask_at:
                asked = True
                await fleet.leave()
            await asyncio.wait([self._at_once], timeout=POLL_S)
        return INTERRUPTED
