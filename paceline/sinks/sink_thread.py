"""A thread that brings points to one sink, for as long as this process leads.

    open ──► read some points ──► write ──► read ...        closing: what is there, then close
      ▲              │ the sink raises
      └── wait, longer each time

Nobody waits for a sink: one that hangs holds up its own thread alone, and that one dies with the
process.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from paceline.process.structured_log import event
from paceline.sinks.base import Sink, key_of
from paceline.sinks.point_reader import PointReader

log = logging.getLogger(__name__)

LOOK_S = 0.5
AT_ONCE = 256
FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 60.0
STUCK_S = 30.0


class SinkThread:
    """Feeds ``sink`` from the run's metrics.jsonl until ``close``."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Sink],
        path: Path,
        *,
        may_write: Callable[[], bool],
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        """``may_write`` says whether this process still leads: a deposed leader that wakes up must
        not write beside its successor. ``first_pause_s``: before the first new try."""
        self.name = name
        self.written = 0
        """Points."""
        self.trouble = ""
        """Why the sink could not be written to the last time; empty: it could."""
        self._make = make
        self._path = path
        self._may_write = may_write
        self._first_pause_s = first_pause_s
        self._busy_since: float | None = None
        self._outcome: str | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"sink-{name}", daemon=True)
        self._thread.start()

    @property
    def failing(self) -> bool:
        """It raised the last time, or has not come back from a call for long."""
        since = self._busy_since
        return bool(self.trouble) or (since is not None and time.monotonic() - since > STUCK_S)

    def begin_close(self, outcome: str | None) -> None:
        """Of a run that has ended what the file has by now is written, else the next leader does
        that; then the sink is closed. Later calls change nothing."""
        if not self._closing.is_set():
            self._outcome = outcome
            self._closing.set()

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended by then."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        pause_s = self._first_pause_s
        while True:
            before = self.written
            sink: Sink | None = None
            try:
                self._busy_since = time.monotonic()
                sink = self._make()
                self._follow(sink)
                sink.close(self._outcome)
                return
            except Exception as error:  # of the sink's own making: whatever it is, the run goes on
                self._say(error)
                _give_up(sink)
            finally:
                self._busy_since = None
            if self._closing.is_set() or self._closing.wait(pause_s):
                return
            pause_s = (
                self._first_pause_s if self.written > before else min(LAST_PAUSE_S, 2 * pause_s)
            )

    def _follow(self, sink: Sink) -> None:
        """Returns once closing was asked for and everything there was is written."""
        place = sink.open()
        event(log, "sink open", name=self.name, after=place or "nothing")
        reader = PointReader(self._path, key_of(place) if place else None)
        while True:
            self._busy_since = None
            closing = self._closing.wait(LOOK_S)
            if closing and self._outcome is None:
                return
            self._busy_since = time.monotonic()
            while self._may_write() and (points := reader.read(AT_ONCE)):
                sink.write(points)
                self.written += len(points)
                self._busy_since = time.monotonic()
                if self.trouble:
                    event(log, "sink works again", name=self.name)
                    self.trouble = ""
            if closing:
                return

    def _say(self, error: Exception) -> None:
        """Once for each reason: an outage of hours is one line."""
        trouble = f"{type(error).__name__}: {error}"
        if trouble != self.trouble:
            event(log, "sink failed, trying on", logging.WARNING, name=self.name, why=trouble)
        self.trouble = trouble


def _give_up(sink: Sink | None) -> None:
    """Lets go of what a failed sink still holds: the next try makes a new one."""
    if sink is not None:
        with contextlib.suppress(Exception):
            sink.close(None)
