"""Exporters of a leader: metric sinks, sample traces, alerts and the sample archive.

Each runs in a thread of its own, the archive in a chore, behind the journal. Nobody waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from controller.export.alert_thread import AlertThread, RunPace
from controller.export.group_content import FillTexts
from controller.export.sample_archiver import SampleArchiver
from controller.export.traces import Traces
from paceline.config.schema import Config
from paceline.observe.drain import Drain
from paceline.observe.event_history import is_listed
from paceline.observe.json_lines import finite, metrics_row
from paceline.observe.sinks.registry import external_run, sink_maker
from paceline.observe.sinks.sink_thread import SinkThread
from paceline.payloads.store import PayloadStore

FINISH_S = 1.5  # time, at the end of a run, for the last points to be delivered


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
        self.feeds: list[SinkThread] = []
        self.traces: Traces | None = None
        self.alerts: AlertThread | None = None
        self.archive: SampleArchiver | None = None
        if config.archive.enabled:
            self.archive = SampleArchiver(
                config.archive, run_dir, payloads, fill_texts=fill_texts, may_write=may_write
            )

    def start(self, started_t: float, progress: Callable[[], RunPace]) -> None:
        """``started_t``: the run's start in its ledger, unix seconds. ``progress``: the run's pace,
        read in another thread."""
        config, may_write = self._config, self._may_write
        run = external_run(config, self._run_dir, started_t)
        if config.alerts.webhook_file is not None or config.alerts.command:
            name, run_dir = config.run.name, self._run_dir
            self.alerts = AlertThread(config.alerts, name, run_dir, progress, may_write=may_write)
        if config.telemetry.otlp_endpoint is not None:
            self.traces = Traces(config, run.id)
        path = self._run_dir / "metrics.jsonl"
        self.feeds = [
            SinkThread(name, sink_maker(name, run), path, may_write=may_write)
            for name in config.metrics.sinks
        ]
        for drain in self._drains():
            drain.start()

    def record(
        self, position: str, t: float, records: Sequence[Mapping[str, Any]], *, new: bool
    ) -> None:
        """Takes the next journal entry, as the run files do; returns at once. ``new``: this leader
        has decided it; an earlier one has sent its traces."""
        if self.traces is not None and new:
            self.traces.put((t, records))
        for n, record in enumerate(records):
            head = {"position": position, "n": n, "t": round(t, 3)}
            if self.feeds and (row := metrics_row(record)) is not None:
                for feed in self.feeds:
                    feed.put({**head, **row})
            if self.alerts is not None and is_listed(record):
                self.alerts.put({**head, **finite(record)})

    def begin_close(self, outcome: str | None) -> None:
        """Returns at once. ``outcome``: finished or failed; None if the run goes on."""
        for drain in self._drains():
            drain.begin_close(outcome)

    def join(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        return all(drain.join(max(0.0, deadline - time.monotonic())) for drain in self._drains())

    def _drains(self) -> list[Drain[Any]]:
        return [drain for drain in (*self.feeds, self.traces, self.alerts) if drain is not None]
