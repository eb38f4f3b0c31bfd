"""Thread that sends a run's alerts while this process leads.

    events.jsonl, metrics.jsonl ──► rules ──► webhook, command ──► cursor (alerts.json)
    last commit, free disk      ──►   │

The cursor is written after an alert is delivered or given up, so the next leader goes on there: an
alert is sent at least once, with the same id. Nobody waits for the thread. An alert that cannot be
delivered is tried ``TRIES`` times; then it is logged, and the next one has its turn.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.alerts.delivery import Delivery, NotDelivered
from paceline.alerts.rules import Alert, AlertRules
from paceline.config.sections.services import AlertsConfig
from paceline.observe.event_history import position_key
from paceline.observe.file_tail import FileTail
from paceline.process.structured_log import event

log = logging.getLogger(__name__)

POLL_S = 1.0
TRIES = 5
FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 0.5
"""Between tries once the run is over."""
OLD_S = 600.0
"""If there is no cursor, what is older than this was no alert at its time: alerts are new to the
run."""
_FILES = ("events", "metrics")
_Key = tuple[tuple[int, ...], int]


@dataclass(frozen=True, slots=True)
class RunPace:
    """Of the run, for the stall alert."""

    step: int
    last_commit_t: float
    """Unix seconds."""
    open: bool
    """It is to make progress: neither ended nor paused nor stopped for now."""


class AlertThread:
    def __init__(
        self,
        config: AlertsConfig,
        run: str,
        run_dir: Path,
        progress: Callable[[], RunPace],
        *,
        may_write: Callable[[], bool],
        first_pause_s: float = FIRST_PAUSE_S,
        poll_s: float = POLL_S,
    ) -> None:
        """``may_write`` returns whether this process still leads."""
        self._config = config
        self._run = run
        self._run_dir = run_dir
        self._progress = progress
        self._may_write = may_write
        self._first_pause_s = first_pause_s
        self._poll_s = poll_s
        self._rules = AlertRules(frozenset(config.on), config.reward_drop)
        self._delivery = Delivery.of(config)
        self._cursor_path = run_dir / "alerts.json"
        self._waits_since = 0.0
        """When the newest commit was seen, or that the run goes on after a pause. On the monotonic
        clock: the wall clock may be set."""
        self._seen: tuple[float, bool] | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="alerts", daemon=True)
        self._thread.start()

    def begin_close(self) -> None:
        """Returns at once. What the files have by then is still sent."""
        self._closing.set()

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        self._cursor = self._read_cursor()
        self._since = 0.0 if self._cursor else time.time() - OLD_S
        tails = {name: FileTail(self._run_dir / f"{name}.jsonl") for name in _FILES}
        closing = False
        while not closing:
            # Read before the files: the lines that came before the call to close are sent.
            closing = self._closing.wait(self._poll_s)
            for name, tail in tails.items():
                for _, record in tail.records():
                    self._survive(self._take, name, record)
            if not closing:
                self._survive(self._look)

    def _look(self) -> None:
        self._send(self._of_state())

    def _survive(self, part: Callable[..., None], *arguments: Any) -> None:
        """A disk that fails for a moment, or a line of another release, is logged, and costs no
        other line its alert."""
        try:
            part(*arguments)
        except Exception as error:
            event(log, "alerts interrupted", logging.ERROR, why=str(error))

    def _take(self, name: str, record: dict[str, Any]) -> None:
        key = position_key(str(record.get("position", ""))), int(record.get("n", 0))
        rules = self._rules
        found = list(rules.of_event(record) if name == "events" else rules.of_metrics(record))
        # Earlier lines still go through the rules: they remember the best reward.
        if key > self._at(name):
            self._send(alert for alert in found if alert.t >= self._since)
            self._cursor[name] = [list(key[0]), key[1]]
            if found:
                self._save_cursor()

    def _of_state(self) -> Iterable[Alert]:
        now, seen, done = time.time(), self._progress(), self._cursor
        waited = self._waited(seen, now)
        stalled = seen.open and seen.last_commit_t > 0 and waited > self._config.stall_s
        if stalled and done.get("stall_step") != seen.step:
            done["stall_step"] = seen.step
            text = f"no step was committed for {waited:.0f} s; the last one was step {seen.step}"
            yield from self._rules.of_state("stall", str(seen.step), text, now, seen.step)
        free_gb = shutil.disk_usage(self._run_dir).free / 1e9
        low = free_gb < self._config.disk_free_gb
        told = done.get("disk_low")
        # Before the alert: without room for the cursor, it is not sent again in the next second.
        if low or free_gb > 1.2 * self._config.disk_free_gb:
            done["disk_low"] = low
        if low and not told:
            text = f"{free_gb:.1f} GB are free in the run directory"
            yield from self._rules.of_state("disk", str(int(now)), text, now, seen.step)

    def _waited(self, seen: RunPace, now: float) -> float:
        """Seconds without a commit. Before the first look they are known by the wall clock alone."""
        looked, first = time.monotonic(), self._seen is None
        if self._seen != (seen.last_commit_t, seen.open):
            self._seen = seen.last_commit_t, seen.open
            before = max(0.0, now - seen.last_commit_t) if first and seen.open else 0.0
            self._waits_since = looked - before
        return looked - self._waits_since

    def _send(self, alerts: Iterable[Alert]) -> None:
        for alert in alerts:
            self._deliver(alert)
            self._save_cursor()

    def _deliver(self, alert: Alert) -> None:
        pause_s = self._first_pause_s
        for left in range(TRIES - 1, -1, -1):
            if not self._may_write():
                return
            try:
                self._delivery.send(alert.message(self._run))
                event(log, "alert sent", kind=alert.kind, id=alert.key)
                return
            except NotDelivered as why:
                level = logging.WARNING if left else logging.ERROR
                event(log, "alert not delivered", level, kind=alert.kind, id=alert.key, why=why)
            if left and not self._closing.wait(pause_s):
                pause_s *= 4
            elif left:
                # The process ends soon.
                time.sleep(min(pause_s, LAST_PAUSE_S))

    def _at(self, name: str) -> _Key:
        position, number = self._cursor.get(name) or ([], -1)
        return tuple(position), int(number)

    def _read_cursor(self) -> dict[str, Any]:
        try:
            value = json.loads(self._cursor_path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def _save_cursor(self) -> None:
        if not self._may_write():
            return
        partial = self._cursor_path.with_suffix(f".{os.getpid()}.part")
        try:
            partial.write_text(json.dumps(self._cursor), encoding="utf-8")
            partial.replace(self._cursor_path)
        except OSError as error:
            # The next leader may send an alert again, with the same id. None is lost.
            event(log, "alert position not written", logging.ERROR, why=str(error))
