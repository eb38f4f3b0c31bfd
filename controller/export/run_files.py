"""Thread that writes the leader's run files, behind the journal.

A new leader first writes what an earlier one had journalled and not yet written.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.observe.drain import Drain
from paceline.observe.run_file_writer import RunFileWriter

log = logging.getLogger(__name__)

Item = tuple[str, float, Sequence[Mapping[str, Any]]]
"""Journal position, Unix seconds, event records with their words."""


class RunFiles(Drain[Item]):
    """Feeds a ``RunFileWriter``. A disk that fails is logged once and never stops the run.
    ``start`` opens the files, which takes them from an earlier leader: call it once the term is in
    the journal. A controller that does not know yet that it is deposed would take them from its
    successor."""

    def __init__(self, run_dir: Path, *, may_write: Callable[[], bool]) -> None:
        """``may_write`` returns whether this process still leads: a deposed leader that wakes up
        must not write lines beside those of its successor."""
        super().__init__("run-files")
        self._run_dir = run_dir
        self._may_write = may_write
        self._failed = False
        self._unopened = False  # the files could not be opened: what is recorded is discarded
        self._idle = threading.Event()
        self._opened: concurrent.futures.Future[str | None] = concurrent.futures.Future()

    async def opened(self) -> str | None:
        """Journal position at which the files end; None: they are empty."""
        return await asyncio.wrap_future(self._opened)

    def record(self, position: str, t: float, events: Sequence[Mapping[str, Any]]) -> None:
        if not self._unopened:
            self.put((position, t, events))
            self._idle.clear()

    async def written(self, timeout_s: float = 5.0) -> bool:
        """True if everything taken so far is in the files by then."""
        return await asyncio.to_thread(self._idle.wait, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Writes what was taken, if this process still may, then closes the files."""
        self.begin_close()
        self.join(timeout_s)

    def _serve(self) -> None:
        try:
            recorder = RunFileWriter(self._run_dir)
        except (OSError, ValueError) as error:
            log.error("run files cannot be opened error=%s", error)
            self._unopened = True
            self._items.clear()
            self._idle.set()
            self._opened.set_result(None)
            return
        self._opened.set_result(recorder.last_position)
        waiting: deque[Item] = deque()
        for items in self._batches():
            waiting.extend(items)
            while waiting and self._may_write():
                self._survive(lambda: self._record(recorder, *waiting.popleft()))
            self._survive(lambda: self._keep_place(recorder))
            if not waiting and not self._items:
                self._idle.set()
        self._survive(recorder.close)

    def _survive(self, part: Callable[[], None]) -> None:
        try:
            part()
        except OSError as error:
            if not self._failed:
                log.error("run files cannot be written error=%s", error)
            self._failed = True

    @staticmethod
    def _record(
        recorder: RunFileWriter, position: str, t: float, events: Sequence[Mapping[str, Any]]
    ) -> None:
        for event in events:
            recorder.record(position, t, event)

    def _keep_place(self, recorder: RunFileWriter) -> None:
        if self._may_write() and recorder.keep_place():
            log.warning("run files were taken by a deposed leader, and are put back")
