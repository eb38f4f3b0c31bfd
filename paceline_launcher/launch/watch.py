"""Watch over a run: polls the leader until the run ends, and stops it if it is asked to."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import time
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import can_pass, in_words
from paceline.observe.event_history import text_of
from paceline.observe.file_tail import FileTail
from paceline.observe.run_watcher import leader_status
from paceline.observe.vocabulary import AT_EVERY_STEP
from paceline.redis.client import remedy_of
from paceline.rpc.auth import dashboard_link
from paceline.rpc.client import ControlPlane, ControlPlaneUnavailable, RequestRefused
from paceline.v1 import admin_pb2
from paceline_launcher.launch.fleet import Fleet
from paceline_launcher.live_view import Console

POLL_S = 0.5
START_EVERY_S = 3.0  # between two questions what the first step waits for
ASK_LIMIT_S = 2.0
REMOVED = (
    "{run_dir} was removed while the run went on, with its journal and its checkpoints. Start the "
    "run again, in a directory that stays (--run-dir)"
)


def place_of(directory: Path) -> tuple[int, int] | None:
    """Device and number of ``directory``; None if it was removed."""
    with contextlib.suppress(FileNotFoundError):
        found = directory.stat()
        return found.st_dev, found.st_ino
    return None


@dataclass(eq=False)
class RunWatch:
    console: Console
    fleet: Fleet
    interrupts: Interrupts
    extends_to: int = 0
    """Steps of a finished run that is given more of them."""
    token: str | None = None
    begun: bool = False
    """A leader has had a term. A controller that reads the journal again tells of none."""

    def __post_init__(self) -> None:
        self.status: admin_pb2.StatusReply | None = None  # newest answer of a controller
        self._place = place_of(self.fleet.specs.run_dir)
        self._events = FileTail(self.fleet.specs.run_dir / "events.jsonl")
        list(self._events.records())  # what an earlier session of the run left is no news
        self._dashboard = self._trouble = self._start = ""
        self._ask_why_at = time.monotonic() + START_EVERY_S
        self._stop: TimedStop | None = None  # set while the run is being stopped

    async def until_end(self, beside: Coroutine[Any, Any, None]) -> tuple[str, str]:
        """(status, reason) of the run, once it has ended. Runs ``beside`` meanwhile."""
        task = asyncio.create_task(beside)
        first, second = self.interrupts.first, self.interrupts.second
        try:
            while True:
                try:
                    run_dir = self.fleet.specs.run_dir
                    if await asyncio.to_thread(place_of, run_dir) != self._place:
                        return "failed", REMOVED.format(run_dir=run_dir)
                    if self.fleet.failed.done():
                        return "failed", self.fleet.failed.result()
                    for event in await asyncio.to_thread(lambda: list(self._events.records())):
                        if event["type"] not in AT_EVERY_STEP:  # the view shows steps
                            self.console.note(text_of(event))
                    if end := await self.poll():
                        return end
                except ControlPlaneUnavailable:
                    # An election, or they are still starting. A stop is timed all the same.
                    self._note_start("waiting for the controllers, which start")
                    if first.done() and self.status is not None:
                        self._begin_stop(self.status)
                except RequestRefused as error:
                    return "failed", error.message
                except (OSError, RuntimeError, MemoryError) as error:
                    if not can_pass(error):
                        raise
                    self._note_trouble(f"paused: {in_words(error)}")
                if self.must_stop_now:
                    return "interrupted", "interrupted"
                if task.done():
                    task.result()
                again = second if first.done() else first
                waiting: list[asyncio.Future[Any]] = [again, self.fleet.failed, task]
                await asyncio.wait(waiting, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()

    def _note_trouble(self, words: str) -> None:
        """Says once what holds the run up, and once that it goes on. ``words``: empty for none."""
        if words != self._trouble:
            self.console.note(words or "the run goes on")
        self._trouble = words

    def _note_start(self, words: str) -> None:
        """Says once what a run waits for before its first step."""
        about = re.sub(r"[\d.]+", "", words)  # without its numbers, which change
        if (self.status is None or not self.status.step) and about not in ("", self._start):
            self._start = about
            self.console.note(words)

    async def _tell_start(self) -> None:
        """Asks, once in a few seconds, what the first step waits for."""
        if time.monotonic() >= self._ask_why_at:
            self._ask_why_at = time.monotonic() + START_EVERY_S
            with contextlib.suppress(ControlPlaneUnavailable, RequestRefused):
                why = await self.fleet.control.call(
                    "AdminService.Why", admin_pb2.WhyRequest(), timeout_s=ASK_LIMIT_S
                )
                culprit = f"{why.culprit.name}, {why.because}" if why.culprit.name else ""
                self._note_start(f"waiting for {culprit}" if culprit else "")

    async def poll(self) -> tuple[str, str] | None:
        """Looks at the run once, and acts on it. (status, reason) once it has ended."""
        if self._stop is not None:
            await self._stop.ask()
        interrupted = self.interrupts.first.done
        status = self.status = await leader_status(self.fleet.control, ASK_LIMIT_S)
        self.begun |= status.term > 0
        leading = [c.rest for c in status.controllers if c.state == "leader" and c.rest]
        if leading and not self._dashboard:
            self._dashboard = leading[0]
            self.console.note(f"dashboard: {dashboard_link(self._dashboard, self.token)}")
        # At the start every controller waits for Redis for a moment.
        held = status.phase.startswith("paused: ") or (
            self.begun and status.phase.startswith("waiting for ")
        )
        remedy = remedy_of(status.phase)
        self._note_trouble(f"{status.phase}. {remedy}".removesuffix(". ") if held else "")
        self.console.show(status)
        if not status.step and status.phase in ("waiting", "running"):
            await self._tell_start()
        if status.total_steps < self.extends_to:
            return None  # the journal's end; the leader has not extended the run yet
        if status.phase in ("finished", "failed"):
            self.fleet.finished = status.phase == "finished"
            return status.phase, status.reason
        if interrupted() and status.phase == "suspended":
            return "interrupted", f"stopped after step {status.step}"
        await self.fleet.reconcile(status)
        if self._stop is None and (interrupted() or status.phase == "stopping"):
            await self._begin_stop(status).ask()
        elif not interrupted() and status.phase in ("suspending", "suspended"):
            request = admin_pb2.ContinueRequest(request_id=uuid.uuid4().hex)
            with contextlib.suppress(RequestRefused):  # the run's status says why
                await self.fleet.control.call("AdminService.Continue", request, ASK_LIMIT_S)
        return None

    def _begin_stop(self, status: admin_pb2.StatusReply) -> TimedStop:
        if self._stop is None:
            ending = status.phase == "stopping"
            self._stop = TimedStop(
                self.fleet.control, self.fleet.config.fleet.stop_s, ending=ending
            )
        return self._stop

    @property
    def must_stop_now(self) -> bool:
        """True for a stop that waits for nothing: nothing has begun, the user insists, or it is
        late."""
        if not self.interrupts.first.done():
            return False
        return (
            self.status is None
            # Nothing to save, and no leader to record a stop: the data set of a new run is being
            # opened.
            or not self.begun
            or self.interrupts.second.done()
            or (self._stop is not None and self._stop.overdue)
        )


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
    """Stages of a stop within a time limit, as requests to the ledger. It stops the workers once it
    has recorded the checkpoint, or at the last stage.

    0 ──────────────► limit / 2 ─────────► limit ─────────► limit + LEDGER_S
    commit the open   leave it; write      stop without     stop without
    step              a checkpoint         a checkpoint     the ledger

    ``limit_s``: fleet.stop_s. The time runs from the construction."""

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
