"""Watch over a run: polls the leader until the run ends, and stops it if it is asked to."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine
from typing import Any

from paceline.config.schema import Config
from paceline.observe.event_follower import leader_status
from paceline.observe.event_history import text_of
from paceline.observe.file_tail import FileTail
from paceline.observe.vocabulary import EventType
from paceline.rpc.auth import dashboard_link
from paceline.rpc.client import ControlPlane, ControlPlaneUnavailable, RequestRefused
from paceline.v1 import admin_pb2
from paceline_launcher.console.live_view import Console
from paceline_launcher.launch.fleet import Fleet
from paceline_launcher.launch.stop import Interrupts, TimedStop

POLL_S = 0.5
ASK_LIMIT_S = 2.0


class RunWatch:
    """``extends_to``: steps of a finished run that is given more of them."""

    def __init__(
        self,
        config: Config,
        console: Console,
        fleet: Fleet,
        control: ControlPlane,
        interrupts: Interrupts,
        events: FileTail,
        extends_to: int = 0,
        *,
        token: str | None = None,
        adopted: bool = False,
    ) -> None:
        self.status: admin_pb2.StatusReply | None = None  # newest answer of a controller
        self.accepted = adopted  # a leader has begun its term with this config
        self._begun = adopted
        """A leader has had a term. A controller that reads the journal again tells of none."""
        self._config, self._console, self._fleet, self._control = config, console, fleet, control
        self._interrupts, self._events, self._extends_to = interrupts, events, extends_to
        self._token, self._dashboard = token, ""
        self._stop: TimedStop | None = None  # set while the run is being stopped

    async def until_end(self, beside: Coroutine[Any, Any, None]) -> tuple[str, str]:
        """(status, reason) of the run, once it has ended. Runs ``beside`` meanwhile."""
        task = asyncio.create_task(beside)
        first, second = self._interrupts.first, self._interrupts.second
        try:
            while True:
                if self._fleet.failed.done():
                    return "failed", self._fleet.failed.result()
                await self._note_events()
                try:
                    if end := await self.poll():
                        return end
                except ControlPlaneUnavailable:
                    # An election, or they are still starting. A stop is timed all the same.
                    if first.done() and self.status is not None:
                        self._begin_stop(self.status)
                except RequestRefused as error:
                    return "failed", error.message
                if self.must_stop_now:
                    return "interrupted", "interrupted"
                if task.done():
                    task.result()
                again = second if first.done() else first
                waiting: list[asyncio.Future[Any]] = [again, self._fleet.failed, task]
                await asyncio.wait(waiting, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()

    async def poll(self) -> tuple[str, str] | None:
        """Looks at the run once, and acts on it. (status, reason) once it has ended."""
        if self._stop is not None:
            await self._stop.ask()
        interrupted = self._interrupts.first.done
        status = self.status = await leader_status(self._control, ASK_LIMIT_S)
        self._begun |= status.term > 0
        self._note_dashboard(status)
        self._console.show(status)
        if status.total_steps < self._extends_to:
            return None  # the journal's end; the leader has not extended the run yet
        if status.phase in ("finished", "failed"):
            self._fleet.finished = status.phase == "finished"
            return status.phase, status.reason
        if interrupted() and status.phase == "suspended":
            return "interrupted", f"stopped after step {status.step}"
        await self._fleet.reconcile(status)
        if self._stop is None and (interrupted() or status.phase == "stopping"):
            await self._begin_stop(status).ask()
        elif not interrupted() and status.phase in ("suspending", "suspended"):
            request = admin_pb2.ContinueRequest(request_id=uuid.uuid4().hex)
            await self._control.call("AdminService.Continue", request, timeout_s=ASK_LIMIT_S)
        return None

    def _begin_stop(self, status: admin_pb2.StatusReply) -> TimedStop:
        if self._stop is None:
            ending = status.phase == "stopping"
            self._stop = TimedStop(self._control, self._config.fleet.stop_s, ending=ending)
        return self._stop

    @property
    def must_stop_now(self) -> bool:
        """True for a stop that waits for nothing: nothing has begun, the user insists, or it is
        late."""
        if not self._interrupts.first.done():
            return False
        return (
            self.status is None
            # Nothing to save, and no leader to record a stop: the data set of a new run is being
            # opened.
            or not self._begun
            or self._interrupts.second.done()
            or (self._stop is not None and self._stop.overdue)
        )

    def _note_dashboard(self, status: admin_pb2.StatusReply) -> None:
        urls = [c.rest for c in status.controllers if c.state == "leader" and c.rest]
        if urls and not self._dashboard:
            self._dashboard = urls[0]
            self._console.keep(f"dashboard: {dashboard_link(self._dashboard, self._token)}")

    async def _note_events(self) -> None:
        """Prints the new lines of events.jsonl. The live view shows steps itself."""
        for _, event in await asyncio.to_thread(lambda: list(self._events.records())):
            self.accepted |= event["type"] == EventType.TERM_BEGUN
            if event["type"] != EventType.STEP_COMMITTED:
                self._console.note(text_of(event))
