"""Thread that writes the leader's run files, behind the journal.

A new leader first writes what an earlier one had journalled and not yet written. The thread polls a
few times a second: woken for every entry, it would compete with the event loop for the interpreter.
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

from paceline.observe.run_file_writer import RunFileWriter

log = logging.getLogger(__name__)

LOOK_S = 0.2

Item = tuple[str, float, Sequence[Mapping[str, Any]]]
"""Journal position, Unix seconds, event records with their words."""


class RunFiles:
    """Feeds a ``RunFileWriter`` from ``start`` on. A disk that fails is logged once and never stops
    the run."""

    def __init__(self, run_dir: Path, *, may_write: Callable[[], bool]) -> None:
        """``may_write`` returns whether this process still leads: a deposed leader that wakes up
        must not write lines beside those of its successor."""
        self._run_dir = run_dir
        self._may_write = may_write
        self._items: deque[Item] = deque()
        self._closing = threading.Event()
        self._failed = False
        self._unopened = False
        """The files could not be opened: what is recorded is discarded."""
        self._idle = threading.Event()
        self._opened: concurrent.futures.Future[str | None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._serve, name="run-files", daemon=True)

    def start(self) -> None:
        """Opens the files, which takes them from an earlier leader: call it once the term is in the
        journal. A controller that does not know yet that it is deposed would take them from its
        successor."""
        self._thread.start()

    async def opened(self) -> str | None:
        """Journal position at which the files end; None: they are empty."""
        return await asyncio.wrap_future(self._opened)

    def record(self, position: str, t: float, events: Sequence[Mapping[str, Any]]) -> None:
        """Takes one journal entry; returns at once."""
        if self._unopened:
            return
        self._idle.clear()
        self._items.append((position, t, events))

    async def written(self, timeout_s: float = 5.0) -> bool:
        """True if everything taken so far is in the files by then."""
        return await asyncio.to_thread(self._idle.wait, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Writes what was taken, if this process still may, then closes the files."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

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
        closing = False
        while not closing:
            # Read before the items: those that came before the call to close are written.
            closing = self._closing.wait(LOOK_S)
            self._write(recorder)
        try:
            recorder.close()
        except OSError as error:
            log.error("run files cannot be closed error=%s", error)

    def _write(self, recorder: RunFileWriter) -> None:
        while self._items and self._may_write():
            position, t, events = self._items.popleft()
            try:
                for event in events:
                    recorder.record(position, t, event)
            except OSError as error:
                if not self._failed:
                    log.error("run files cannot be written error=%s", error)
                self._failed = True
        self._keep_place(recorder)
        if not self._items:
            self._idle.set()

    def _keep_place(self, recorder: RunFileWriter) -> None:
        try:
            if self._may_write() and recorder.keep_place():
                log.warning("run files were taken by a deposed leader, and are put back")
        except OSError as error:
            if not self._failed:
                log.error("run files cannot be put back error=%s", error)
            self._failed = True
