"""Polling view of a running fleet, across failovers, until the run is over.

GetStatus, periodically ────►┐
events, as they happen ─────►┼──► RunPicture ──► live table, plain lines, or JSON
run files or REST, once ────►┘    (the past of the run)
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from paceline.rpc.client import ControlPlane, ControlPlaneUnavailable, RequestRefused
from paceline.rpc.rest_client import RestReader, RestRefused, RestUnavailable
from paceline.run_view.eta import Progress
from paceline.run_view.event_follower import GONE_S, answers, follow_events, position_at
from paceline.run_view.run_records import RunRecords
from paceline.run_view.summary import read_summary
from paceline.run_view.words import is_listed, text_of
from paceline.v1 import admin_pb2

FIRST_ANSWER_S = 5.0
ANSWER_S = 2.0
EVENTS_KEPT = 8
HISTORY_POINTS = 400
LOOK_BACK_S = 60.0
"""Without run files and REST, the journal is read from so long ago."""
ENDS = {"RunFinished": "finished", "RunFailed": "failed"}


@dataclass(slots=True)
class RunPicture:
    """What is known of the run."""

    progress: Progress = field(default_factory=Progress)
    events: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))
    """(Unix seconds, text) of the last ones other than commits, oldest first."""
    reached: str = ""
    """Journal position of the newest event taken."""
    status: admin_pb2.StatusReply | None = None
    ended: str = ""
    """finished or failed, as soon as an event says so."""

    def take(self, event: dict[str, Any]) -> str | None:
        """Takes an event record; returns its text if it is to be shown."""
        kind = str(event.get("type", ""))
        if kind == "StepCommitted":
            self.progress.add(int(event["step"]), event.get("metrics") or {})
            return None
        if kind == "RolledBack":
            self.progress.back_to(int(event["step"]))
        if not is_listed(event):
            return None
        self.ended = ENDS.get(kind, self.ended)
        text = text_of(event)
        self.events.append((float(event.get("at") or event.get("t") or time.time()), text))
        return text


class Shown(Protocol):
    """Display of a picture."""

    def begin(self, picture: RunPicture) -> None: ...

    def look(self, picture: RunPicture) -> None:
        """The status is new."""

    def event(self, t: float, text: str) -> None: ...

    def silent(self, seconds: float) -> None:
        """No controller has answered for ``seconds``."""

    def close(self) -> None: ...


async def first_look(
    control: ControlPlane, run_dir: Path | None, rest: Callable[[list[str]], RestReader]
) -> RunPicture:
    """The run as it is now, with its past. Raises ControlPlaneUnavailable, RequestRefused."""
    status = await answers(control, FIRST_ANSWER_S)
    if status is None:
        raise ControlPlaneUnavailable(
            f"no controller of {', '.join(control.addresses)} answers within {FIRST_ANSWER_S:g} s"
        )
    picture = None
    if run_dir is not None and (run_dir / "events.jsonl").is_file():
        picture = await asyncio.to_thread(_past_from_files, run_dir)
    elif urls := [c.rest for c in status.controllers if c.rest and c.state != "silent"]:
        with contextlib.suppress(RestUnavailable, RestRefused, KeyError, TypeError, ValueError):
            picture = await asyncio.to_thread(_past_from_rest, rest(urls))
    picture = picture or RunPicture(reached=position_at(time.time() - LOOK_BACK_S))
    picture.status = status
    picture.progress.observe(status)
    return picture


async def watch(
    control: ControlPlane,
    picture: RunPicture,
    shown: Shown,
    *,
    every_s: float,
    run_dir: Path | None,
) -> str:
    """Shows ``picture`` as it changes until the run is over; returns finished or failed.

    Raises RequestRefused, and ControlPlaneUnavailable if no controller answers for a minute.
    """
    shown.begin(picture)
    follower = asyncio.create_task(_follow(control, picture, shown))
    answered = time.monotonic()
    try:
        while True:
            began = time.monotonic()
            status = await answers(control, ANSWER_S)
            if status is not None:
                answered = time.monotonic()
                picture.status = status
                picture.progress.observe(status)
                shown.look(picture)
                if status.phase in ENDS.values():
                    return status.phase
            else:
                # The controllers reported the end, or the supervisor wrote it after them.
                if over := picture.ended or _status_in_summary(run_dir):
                    return over
                silent_s = time.monotonic() - answered
                if silent_s > GONE_S:
                    raise ControlPlaneUnavailable(f"no controller answers for {GONE_S:.0f} s")
                shown.silent(silent_s)
            await asyncio.sleep(max(0.0, every_s - (time.monotonic() - began)))
    finally:
        follower.cancel()
        await asyncio.gather(follower, return_exceptions=True)
        shown.close()


async def _follow(control: ControlPlane, picture: RunPicture, shown: Shown) -> None:
    # The status poll reports controllers that are gone or refuse.
    with contextlib.suppress(ControlPlaneUnavailable, RequestRefused):
        async for position, event in follow_events(control, picture.reached):
            picture.reached = position
            text = picture.take(event)
            if text is not None:
                shown.event(picture.events[-1][0], text)


def _status_in_summary(run_dir: Path | None) -> str:
    summary = read_summary(run_dir) if run_dir is not None else None
    status = str((summary or {}).get("status") or "")
    # An interrupted run is not over, but there is nothing left to watch.
    return status if status in ENDS.values() else "interrupted" if status else ""


def _past_from_files(run_dir: Path) -> RunPicture:
    records = RunRecords.read(run_dir)
    picture = RunPicture(Progress(records.metrics), reached=records.history.position)
    for event in records.history.after(None, limit=EVENTS_KEPT, kinds="notable", newest=True):
        picture.events.append((event.t, event.text))
    return picture


def _past_from_rest(rest: RestReader) -> RunPicture:
    curves = rest.get("metrics", names="reward_mean,step_s", points=HISTORY_POINTS)
    picture = RunPicture()
    names = [name for name in ("reward_mean", "step_s") if name in curves["series"]]
    for index, step in enumerate(curves["x"]):
        picture.progress.add(step, {name: curves["series"][name][index] for name in names})
    events = rest.get("events", kind="all", limit=200)["events"]
    if events:
        picture.reached = str(events[-1]["id"]).partition("/")[0]
    for event in [e for e in events if e["type"] != "StepCommitted"][-EVENTS_KEPT:]:
        picture.events.append((float(event["t"]), str(event["text"])))
    return picture
