"""A thread that delivers points to one sink while this process leads.

    open ──► read points ──► write ──► read ...        closing: deliver the rest, then close
      ▲              │ the sink raises
      └── pause, doubled up to a minute

Nobody waits for a sink: one that hangs blocks only its own thread, which ends with the process.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from paceline.process.structured_log import event
from paceline.sinks.base import Sink
from paceline.sinks.point_reader import PointReader

log = logging.getLogger(__name__)

POLL_S = 0.5
POINTS_PER_WRITE = 256
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
STUCK_S = 30.0


@dataclass(eq=False)
class SinkThread:
    """Feeds the sink that ``make`` creates from the run's metrics.jsonl until ``begin_close``."""

    name: str
    make: Callable[[], Sink]
    path: Path
    """metrics.jsonl."""
    may_write: Callable[[], bool]
    """Whether this process still leads: a deposed leader that resumes must not write beside its
    successor."""
    first_pause_s: float = FIRST_PAUSE_S
    """Before the first retry."""
    written: int = field(default=0, init=False)
    """Points."""
    trouble: str = field(default="", init=False)
    """The error of the last call to the sink; empty if it succeeded."""

    def __post_init__(self) -> None:
        self._busy_since: float | None = None
        self._outcome: str | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name=f"sink-{self.name}", daemon=True)
        self._thread.start()

    @property
    def failing(self) -> bool:
        """The last call to the sink raised, or a call has not returned for ``STUCK_S``."""
        since = self._busy_since
        return bool(self.trouble) or (since is not None and time.monotonic() - since > STUCK_S)

    def begin_close(self, outcome: str | None) -> None:
        """Asks the thread to close the sink. Later calls change nothing.

        If the run has ended (``outcome``), the rest of the file is delivered first; otherwise the
        next leader delivers it.
        """
        if not self._closing.is_set():
            self._outcome = outcome
            self._closing.set()

    def join(self, timeout_s: float) -> bool:
        """Waits for the thread; whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        pause_s = self.first_pause_s
        while True:
            before = self.written
            sink: Sink | None = None
            try:
                self._busy_since = time.monotonic()
                sink = self.make()
                self._deliver(sink)
                sink.close(self._outcome)
                return
            except Exception as error:  # whatever a sink raises, the run goes on
                self._report(error)
                if sink is not None:
                    with contextlib.suppress(Exception):
                        sink.close(None)
            finally:
                self._busy_since = None
            if self._closing.is_set() or self._closing.wait(pause_s):
                return
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
            if self.written > before:
                pause_s = self.first_pause_s

    def _deliver(self, sink: Sink) -> None:
        """Writes points as they appear; returns once closing was requested and the rest is written."""
        last = sink.open()
        event(log, "sink open", name=self.name, after="nothing" if last is None else last)
        reader = PointReader(self.path, last)
        while True:
            self._busy_since = None
            closing = self._closing.wait(POLL_S)
            if closing and self._outcome is None:
                return
            self._busy_since = time.monotonic()
            while self.may_write() and (points := reader.read(POINTS_PER_WRITE)):
                sink.write(points)
                self.written += len(points)
                self._busy_since = time.monotonic()
                if self.trouble:
                    event(log, "sink works again", name=self.name)
                    self.trouble = ""
            if closing:
                return

    def _report(self, error: Exception) -> None:
        """Logs each distinct error once: an outage of hours is one line."""
        trouble = f"{type(error).__name__}: {error}"
        if trouble != self.trouble:
            event(log, "sink failed, retrying", logging.WARNING, name=self.name, why=trouble)
        self.trouble = trouble
