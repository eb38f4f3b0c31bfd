"""Thread that sends a run's alerts while this process leads.

    journalled events ──► rules ──► webhook, command ──► place (alerts.json)
    last commit, free disk  ─►│

The place is written after an alert is delivered or given up. The next leader reads the events that
the run's file has after it, so an alert is sent at least once, with the same id.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from paceline.config.sections.services import AlertKind, AlertsConfig
from paceline.observe.alerts import Alert, AlertRules, NotDelivered, deliver
from paceline.observe.drain import Drain
from paceline.observe.event_history import position_key
from paceline.observe.json_lines import read_lines
from paceline.process.structured_log import event

log = logging.getLogger(__name__)

TRIES = 5
FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 0.5  # between tries once the run is over
OLD_S = 600.0  # without a place, alerts are new to the run: what is older than this is not told


class RunPace(NamedTuple):
    """Progress of the run, for the stall alert."""

    step: int
    open: bool
    """The run is to make progress: it has neither ended nor is it paused or stopped for now."""


class AlertThread(Drain[dict[str, Any]]):
    """Takes lines of events: records with position, n and t."""

    def __init__(
        self,
        config: AlertsConfig,
        run: str,
        run_dir: Path,
        progress: Callable[[], RunPace],
        *,
        may_write: Callable[[], bool],
        first_pause_s: float = FIRST_PAUSE_S,
        poll_s: float = 1.0,
    ) -> None:
        super().__init__("alerts", poll_s=poll_s)
        self._config, self._run, self._run_dir = config, run, run_dir
        self._progress, self._may_write = progress, may_write
        self._first_pause_s = first_pause_s
        self._rules = AlertRules(config)
        self._path = run_dir / "alerts.json"
        self._place: dict[str, Any] = {}
        """``events``: position of the newest event looked at. ``told``: alerts of states."""
        self._last: list[Any] = [[], -1]
        self._pace, self._pace_since = RunPace(-1, False), time.monotonic()

    def _serve(self) -> None:
        try:
            self._place = dict(json.loads(self._path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            self._place = {}
        self._since = 0.0 if self._place else time.time() - OLD_S
        self._survive(self._take, read_lines(self._run_dir / "events.jsonl"))
        for lines in self._batches():
            self._survive(self._take, lines)
            self._survive(self._look)

    def _survive(self, part: Callable[..., object], *arguments: Any) -> None:
        try:
            part(*arguments)
        except Exception as error:  # a disk that fails for a moment costs no other alert
            event(log, "alerts interrupted", logging.ERROR, why=str(error))

    def _take(self, lines: Iterable[dict[str, Any]]) -> None:
        for line in lines:
            key = [list(position_key(line["position"])), line["n"]]
            if key <= self._last:
                continue  # the file had it already
            self._last = key
            # Earlier lines still go through the rules: they remember the best reward.
            alerts = list(self._rules.of_event(line))
            if key > self._place.get("events", [[], -1]):
                self._place["events"] = key
                self._send(alert for alert in alerts if alert.t >= self._since)

    def _look(self) -> None:
        """Tells states of the run, each once, also if another leader told it."""
        if self._closing.is_set():
            return
        pace, now = self._progress(), time.monotonic()
        if pace != self._pace:
            self._pace, self._pace_since = pace, now
        waited, told = now - self._pace_since, self._place.setdefault("told", {})
        free_gb = shutil.disk_usage(self._run_dir).free / 1e9

        def tell(kind: AlertKind, key: str, text: str) -> None:
            if told.get(kind) != key:
                told[kind] = key
                self._send(self._rules.tell(Alert(kind, key, text, time.time(), pace.step)))

        if pace.open and waited > self._config.stall_s:
            text = f"no step was committed for {waited:.0f} s; the last one was step {pace.step}"
            tell("stall", str(pace.step), text)
        if free_gb < self._config.disk_free_gb:
            key = told.get("disk") or str(int(time.time()))
            tell("disk", key, f"{free_gb:.1f} GB are free in the run directory")
        elif free_gb > 1.2 * self._config.disk_free_gb:
            told.pop("disk", None)

    def _send(self, alerts: Iterable[Alert]) -> None:
        for alert in alerts:
            self._deliver(alert)
            if self._may_write():
                partial = self._path.with_suffix(f".{os.getpid()}.part")
                self._survive(partial.write_text, json.dumps(self._place))
                self._survive(partial.replace, self._path)

    def _deliver(self, alert: Alert) -> None:
        pause_s = self._first_pause_s
        for left in reversed(range(TRIES)):
            if not self._may_write():
                return
            try:
                deliver(self._config, alert.message(self._run))
                event(log, "alert sent", kind=alert.kind, id=alert.key)
                return
            except NotDelivered as why:
                level = logging.WARNING if left else logging.ERROR
                event(log, "alert not delivered", level, kind=alert.kind, id=alert.key, why=why)
            if left and self._closing.wait(pause_s):
                time.sleep(min(pause_s, LAST_PAUSE_S))  # the process ends soon
            pause_s *= 4
