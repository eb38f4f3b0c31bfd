"""Exporters of a leader.

Metric sinks, sample traces, the sample archive and alerts.

Each runs in a thread of its own, behind the journal and the run files. Nobody waits for them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from controller.export.alert_thread import AlertThread, RunPace
from controller.export.otel_traces import Traces
from controller.export.sample_archiver import SampleArchiver
from controller.rest.replies.group_replies import FillTexts
from controller.store.journal import START, Journal
from paceline.config.schema import Config
from paceline.payloads.store import PayloadStore
from paceline.process.structured_log import event
from paceline.sinks.registry import external_run, sink_maker
from paceline.sinks.sink_thread import SinkThread

log = logging.getLogger(__name__)

FINISH_S = 1.5
"""How long the process waits, at the end of a run, for the last points to be delivered."""


class Exporters:
    """``start`` once the run's start time is known; then ``record`` every journalled entry."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        payloads: PayloadStore,
        *,
        fill_texts: FillTexts,
        may_write: Callable[[], bool],
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._may_write = may_write
        self._run_id = ""
        self.feeds: list[SinkThread] = []
        self.traces: Traces | None = None
        if config.telemetry.otlp_endpoint is not None:
            self.traces = Traces(config)
        self.alerts: AlertThread | None = None
        self.archive: SampleArchiver | None = None
        if config.archive.enabled:
            self.archive = SampleArchiver(
                config.archive, run_dir, payloads, fill_texts=fill_texts, may_write=may_write
            )

    def start(self, started_t: float, progress: Callable[[], RunPace]) -> None:
        """``started_t``: the run's start in its ledger, unix seconds. ``progress``: of the run,
        read in another thread."""
        alerts = self._config.alerts
        if alerts.webhook_file is not None or alerts.command:
            self.alerts = AlertThread(
                alerts,
                self._config.run.name,
                self._run_dir,
                progress,
                may_write=self._may_write,
            )
        run = external_run(self._config, self._run_dir, started_t)
        self._run_id = run.id
        path = self._run_dir / "metrics.jsonl"
        self.feeds = [
            SinkThread(name, sink_maker(name, run), path, may_write=self._may_write)
            for name in self._config.metrics.sinks
        ]

    async def replay(self, journal: Journal, until: str) -> None:
        """Reads the entries of earlier leaders: tasks in flight began in them."""
        if self.traces is None:
            return
        position = START
        try:
            while entries := await journal.scan(position, until=until):
                for entry in entries:
                    self.traces.remember(entry.t, entry.events)
                position = entries[-1].at.entry
        except (RedisError, OSError) as error:
            event(log, "traces begin with this term", logging.WARNING, why=type(error).__name__)
        self.traces.start(self._run_id)

    def record(self, t: float, events: Sequence[Mapping[str, Any]]) -> None:
        """Takes the next journal entry; returns at once."""
        if self.traces is not None:
            self.traces.record(t, events)

    def begin_close(self, outcome: str | None) -> None:
        """Returns at once. ``outcome``: finished or failed; None if the run goes on."""
        for part in self._parts():
            part.begin_close(outcome)
        for writer in self._writers():
            writer.begin_close()

    def join(self, timeout_s: float) -> bool:
        """Waits for the threads; whether everything was delivered."""
        deadline = time.monotonic() + timeout_s
        parts = [*self._parts(), *self._writers()]
        return all(part.join(max(0.0, deadline - time.monotonic())) for part in parts)

    def _writers(self) -> list[SampleArchiver | AlertThread]:
        return [part for part in (self.archive, self.alerts) if part is not None]

    def _parts(self) -> list[SinkThread | Traces]:
        return [*self.feeds, *([self.traces] if self.traces is not None else [])]
