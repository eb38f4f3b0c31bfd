"""A thread that delivers points to one sink while this process leads.

    open ──► points of the file ──► points of the queue ──► ... closing: the rest, then close
      ▲              │ the sink raises
      └── pause, doubled up to a minute

Nobody waits for a sink: one that hangs blocks only its own thread, which ends with the process.
"""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.observe.file_tail import FileTail
from paceline.observe.sinks.base import Point, Points, Sink
from paceline.process.structured_log import event
from paceline.process.threads import Drain

log = logging.getLogger(__name__)

POLL_S = 0.5
POINTS_PER_WRITE = 256
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
STUCK_S = 30.0


class SinkThread(Drain[Mapping[str, Any]]):
    """Feeds the sink that ``make`` creates with the run's metric rows until ``begin_close``. Rows
    are ``put`` as they are committed. ``path`` (metrics.jsonl) has those before, and those that a
    sink missed while it failed."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Sink],
        path: Path,
        *,
        may_write: Callable[[], bool],
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        """``may_write`` returns whether this process still leads: a deposed leader that resumes
        must not write beside its successor."""
        super().__init__(f"sink-{name}", poll_s=POLL_S)
        self.name = name
        self.written = 0  # points
        self.trouble = ""  # the error of the last call to the sink; empty if it succeeded
        self._make, self._path, self._may_write = make, path, may_write
        self._first_pause_s = first_pause_s
        self._busy_since: float | None = None

    @property
    def failing(self) -> bool:
        """True if the last call to the sink raised, or has not returned for ``STUCK_S``."""
        since = self._busy_since
        return bool(self.trouble) or (since is not None and time.monotonic() - since > STUCK_S)

    def _serve(self) -> None:
        pause_s = self._first_pause_s
        while True:
            before = self.written
            sink: Sink | None = None
            try:
                self._busy_since = time.monotonic()
                sink = self._make()
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
                pause_s = self._first_pause_s

    def _deliver(self, sink: Sink) -> None:
        """Writes points as they appear; returns on the call to close, with the rest written."""
        last = sink.open()
        event(log, "sink open", name=self.name, after="nothing" if last is None else last)
        points, waiting = Points(last), deque[Point]()
        history = points.of(FileTail(self._path).records())
        for rows in self._batches():
            if self._closing.is_set() and self._outcome is None:
                return  # the next leader delivers the rest
            waiting.extend(history)
            waiting.extend(points.of(rows))
            while waiting and self._may_write():
                self._busy_since = time.monotonic()
                batch = [waiting.popleft() for _ in range(min(POINTS_PER_WRITE, len(waiting)))]
                sink.write(batch)
                self.written += len(batch)
                if self.trouble:
                    event(log, "sink works again", name=self.name)
                    self.trouble = ""
            self._busy_since = None

    def _report(self, error: Exception) -> None:
        """Logs each distinct error once: an outage of hours is one line."""
        trouble = f"{type(error).__name__}: {error}"
        if trouble != self.trouble:
            event(log, "sink failed, retrying", logging.WARNING, name=self.name, why=trouble)
        self.trouble = trouble
