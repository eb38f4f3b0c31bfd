"""Exporters of a leader: run files, metric sinks, alerts and the sample archive.

Each runs in a thread of its own, the archive in a chore, behind the journal. Nobody waits for them.
"""

import asyncio
import concurrent.futures
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from controller.export.alerts import AlertThread
from controller.export.sample_archiver import SampleArchiver
from paceline.config.schema import Config
from paceline.observe.projection import Projector
from paceline.observe.run_files import RunFileWriter, metrics_row
from paceline.observe.sinks.base import external_run, sink_maker
from paceline.observe.sinks.sink_thread import SinkThread
from paceline.payloads.store import PayloadStore
from paceline.process.threads import Drain

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
        self._opened.set_running_or_notify_cancel()  # a leader that ends cancels its wait, not this

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
                with self._surviving():
                    position, t, events = waiting.popleft()
                    for event in events:
                        recorder.record(position, t, event)
            with self._surviving():
                if self._may_write() and recorder.keep_place():
                    log.warning("run files were taken by a deposed leader, and are put back")
            if not waiting and not self._items:
                self._idle.set()
        with self._surviving():
            recorder.close()

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._failed:
                log.error("run files cannot be written error=%s", error)
            self._failed = True


FINISH_S = 1.5  # time, at the end of a run, for the last points to be delivered


class Exporters:
    """``start`` once the run's start time is known; then ``record`` every journalled entry."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        payloads: PayloadStore,
        projector: Projector,
        *,
        may_write: Callable[[], bool],
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._projector = projector
        self._may_write = may_write
        self.feeds: list[SinkThread] = []
        self.alerts: AlertThread | None = None
        self.archive: SampleArchiver | None = None
        if config.archive.enabled:
            self.archive = SampleArchiver(config.archive, run_dir, payloads, may_write=may_write)

    def start(self, started_t: float, progress: Callable[[], int | None]) -> None:
        """``started_t``: the run's start in its ledger, unix seconds. ``progress``: as for
        ``AlertThread``, read in another thread."""
        config, may_write = self._config, self._may_write
        run = external_run(config, self._run_dir, started_t)
        if config.alerts.webhook_file is not None or config.alerts.command:
            place = config.run.name, self._run_dir, self._projector
            self.alerts = AlertThread(config.alerts, *place, progress, may_write=may_write)
        path = self._run_dir / "metrics.jsonl"
        self.feeds = [
            SinkThread(name, sink_maker(name, run), path, may_write=may_write)
            for name in config.metrics.sinks
        ]
        for drain in self._drains():
            drain.start()

    def record(self, position: str, t: float, records: Sequence[Mapping[str, Any]]) -> None:
        """Takes the next journal entry, as the run files do; returns at once."""
        if not self.feeds:
            return
        for n, record in enumerate(records):
            if (row := metrics_row(record)) is not None:
                for feed in self.feeds:
                    feed.put({"position": position, "n": n, "t": round(t, 3), **row})

    def begin_close(self, outcome: str | None) -> None:
        """Returns at once. ``outcome``: finished or failed; None if the run goes on."""
        for drain in self._drains():
            drain.begin_close(outcome)

    def join(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        return all(drain.join(max(0.0, deadline - time.monotonic())) for drain in self._drains())

    def _drains(self) -> list[Drain[Any]]:
        return [drain for drain in (*self.feeds, self.alerts) if drain is not None]
