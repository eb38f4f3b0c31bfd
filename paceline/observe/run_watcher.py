"""Running fleet as its controllers tell of it, across failovers, until the run is over.

GetStatus, periodically ────►┐
events, as they happen ─────►┼──► RunPicture ──► live table, plain lines, or JSON
run files, once ────────────►┘    (the past of the run)
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from paceline.observe.curves import Progress
from paceline.observe.event_history import ENDS, is_listed, text_of
from paceline.observe.projection import Projection
from paceline.observe.runs import read_summary
from paceline.observe.vocabulary import AT_EVERY_STEP
from paceline.rpc.client import ControlPlane, ControlPlaneUnavailable, RequestRefused
from paceline.v1 import admin_pb2

IDLE_S = 30.0  # After so long without a message, another controller is asked
GONE_S = 60.0  # After so long without an answer, the controllers are considered gone
FAREWELL_S = 2.0  # GONE_S once the run is over
LEADER_S = 0.5  # Time limit for the leader, if another controller has answered already
START = "0-0"

FIRST_ANSWER_S = 5.0
ANSWER_S = 2.0
EVENTS_KEPT = 8
LOOK_BACK_S = 60.0  # Without run files, the journal is read from so long ago


async def follow_events(
    control: ControlPlane, after: str = "", *, gone_s: float = GONE_S
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yields (journal position, event record) after ``after``, as events happen. Returns once the
    run is over and no controller is left. Raises ControlPlaneUnavailable if no controller answers
    for ``gone_s`` seconds before that."""
    over = False
    seen = 0  # events of the entry after ``after``: a new request repeats the entry from its start
    while True:
        request = admin_pb2.WatchRequest(after=after, follow=True)
        skip, seen = seen, 0
        limit_s = min(gone_s, FAREWELL_S) if over else gone_s
        try:
            records = control.stream(
                "AdminService.WatchEvents", request, idle_s=IDLE_S, timeout_s=limit_s
            )
            async with aclosing(records):
                async for record in records:
                    seen = seen + 1 if record.position == (after or START) else 0
                    after = record.position
                    if skip:
                        skip -= 1
                        continue
                    event = json.loads(record.json)
                    yield after, event
                    if event.get("type") in ENDS and not over:
                        over = True
                        break
                else:
                    return
        except ControlPlaneUnavailable:
            if over:
                return
            # The time limit counts from the newest event, and a paused run has none.
            await control.call(
                "AdminService.GetStatus", admin_pb2.StatusRequest(), timeout_s=gone_s
            )


async def leader_status(control: ControlPlane, timeout_s: float) -> admin_pb2.StatusReply:
    """The run's status from its leader, which alone has heartbeats and gauges; from another
    controller if the leader cannot be reached. Raises ControlPlaneUnavailable and
    RequestRefused."""
    request = admin_pb2.StatusRequest()
    found: admin_pb2.StatusReply = await control.call(
        "AdminService.GetStatus", request, timeout_s=timeout_s
    )
    leader = next((c.address for c in found.controllers if c.state == "leader"), "")
    if leader not in ("", control.address):
        ask = control.bind(leader, "AdminService.GetStatus")
        with contextlib.suppress(grpc.aio.AioRpcError):
            own = await ask(request, timeout=LEADER_S, metadata=control.metadata)
            found = own if own.term >= found.term else found
    return found


async def answers(control: ControlPlane, timeout_s: float) -> admin_pb2.StatusReply | None:
    """The run's status; None if no controller answers in time. Raises RequestRefused."""
    try:
        async with asyncio.timeout(timeout_s + LEADER_S + 1.0):
            return await leader_status(control, timeout_s)
    except (ControlPlaneUnavailable, TimeoutError):
        return None


@dataclass(slots=True)
class RunPicture:
    run: Projection = field(default_factory=Projection)
    reached: str = ""  # Journal position after which events are followed
    status: admin_pb2.StatusReply | None = None
    silent_s: float = 0.0  # Time since a controller answered; 0: the last poll was answered
    _place: tuple[str, int] = ("", 0)
    """Journal position of the newest event, and its number within the entry."""

    @property
    def progress(self) -> Progress:
        return Progress(self.run.metrics)

    @property
    def events(self) -> list[tuple[float, str]]:
        """(Unix seconds, text) of the last ones other than commits, oldest first."""
        found = self.run.history.after(None, limit=EVENTS_KEPT, kinds="notable", newest=True)
        return [(event.t, event.text) for event in found]

    def take(self, event: dict[str, Any]) -> str | None:
        """Takes an event as ``follow_events`` yields it; returns its text if it is to be shown."""
        position = str(event["position"])
        self._place = position, self._place[1] + 1 if position == self._place[0] else 0
        if not is_listed(event):
            return None
        self.run.add_line({**event, "t": event["at"], "n": self._place[1]})
        return None if event["type"] in AT_EVERY_STEP else text_of(event)


async def first_look(control: ControlPlane, run_dir: Path | None) -> RunPicture:
    """The present state of the run, and its past if its files are here. Raises
    ControlPlaneUnavailable, RequestRefused."""
    status = await answers(control, FIRST_ANSWER_S)
    if status is None:
        raise ControlPlaneUnavailable(
            f"no controller of {', '.join(control.addresses)} answers within {FIRST_ANSWER_S:g} s"
        )
    run = Projection()
    if run_dir is not None and (run_dir / "events.jsonl").is_file():
        run = await asyncio.to_thread(Projection.read, run_dir)
    # A journal position is the time in milliseconds.
    look_back = f"{int((time.time() - LOOK_BACK_S) * 1000)}-0"
    picture = RunPicture(run, run.position or look_back, status)
    picture.progress.observe(status)
    return picture


async def watch(
    control: ControlPlane,
    picture: RunPicture,
    show: Callable[[RunPicture], None],
    note: Callable[[str, float], None],
    *,
    every_s: float,
    run_dir: Path | None,
) -> str:
    """Keeps ``picture`` up to date until the run is over; returns finished or failed. ``show`` is
    called after every poll of the status, ``note`` with the text and time (Unix seconds) of each
    event. Raises RequestRefused, and ControlPlaneUnavailable if no controller answers for a
    minute."""
    follower = asyncio.create_task(_follow(control, picture, note))
    answered = time.monotonic()
    try:
        while True:
            began = time.monotonic()
            status = await answers(control, ANSWER_S)
            was_silent = picture.silent_s > 0
            picture.silent_s = 0.0 if status is not None else time.monotonic() - answered
            if status is not None:
                answered = time.monotonic()
                if was_silent:
                    note("a controller answers again", time.time())
                picture.status = status
                picture.progress.observe(status)
            # The controllers reported the end, or the supervisor wrote it after them.
            elif over := picture.run.status or _status_in_summary(run_dir):
                return over
            elif picture.silent_s > GONE_S:
                raise ControlPlaneUnavailable(f"no controller answers for {GONE_S:.0f} s")
            elif not was_silent:
                note("no controller answers; still trying", time.time())
            show(picture)
            if status is not None and status.phase in ENDS.values():
                return status.phase
            await asyncio.sleep(max(0.0, every_s - (time.monotonic() - began)))
    finally:
        follower.cancel()
        await asyncio.gather(follower, return_exceptions=True)


async def _follow(
    control: ControlPlane, picture: RunPicture, note: Callable[[str, float], None]
) -> None:
    # The status poll reports controllers that are gone or refuse.
    with contextlib.suppress(ControlPlaneUnavailable, RequestRefused):
        async for _, event in follow_events(control, picture.reached):
            if (text := picture.take(event)) is not None:
                note(text, float(event["at"]))


def _status_in_summary(run_dir: Path | None) -> str:
    summary = read_summary(run_dir) if run_dir is not None else None
    status = str((summary or {}).get("status") or "")
    # An interrupted run is not over, but there is nothing left to watch.
    return status if status in ENDS.values() else "interrupted" if status else ""
