"""Alerts: the events and states of a run that are worth one, and the thread that sends them while
this process leads.

    journalled events ──► rules ──► webhook, command ──► place (alerts.json)
    last commit, free disk  ─►│

One alert a kind in ``QUIET_S``, but the end of the run always. What is true once is told once. The
place is written after an alert is delivered or given up. The next leader reads the events that the
run's file has after it, so an alert is sent at least once, with the same id. The webhook's address
is a secret (chat services put a key into it): no message and no error contains it.
"""

import json
import logging
import math
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from statistics import fmean
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from paceline.config.sections.services import AlertKind, AlertsConfig
from paceline.observe.event_history import ENDS, position_key
from paceline.observe.held_out import HeldOut
from paceline.observe.run_files import read_lines
from paceline.observe.vocabulary import EventType
from paceline.process.files import replace_file
from paceline.process.structured_log import event
from paceline.process.threads import Drain

log = logging.getLogger(__name__)

QUIET_S = 300.0
WINDOW = 10  # steps whose mean reward is compared
TIMEOUT_S = 10.0
TRIES = 5
FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 0.5  # between tries once the run is over
OLD_S = 600.0  # without a place, alerts are new to the run: what is older than this is not told


@dataclass(frozen=True, slots=True)
class Alert:
    kind: AlertKind
    key: str  # journal position, or what the alert is about: the same however often it is sent
    text: str
    t: float  # Unix seconds
    step: int = 0

    def message(self, run: str) -> dict[str, Any]:
        """The alert as JSON. ``text`` is what chat services show."""
        return {
            "text": f"[{run}] {self.kind.replace('_', ' ')}: {self.text}",
            "run": run,
            "kind": self.kind,
            "id": f"{run}/{self.kind}/{self.key}",
            "step": self.step,
            "t": self.t,
        }


@dataclass(slots=True)
class AlertRules:
    """Rules of one run. Pure: lines of events.jsonl in, alerts out."""

    config: AlertsConfig
    _told: dict[str, float] = field(default_factory=dict)  # Time of the last alert of each kind
    _rewards: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _best: float = -math.inf
    _collapsed: bool = False
    _held_out: HeldOut = field(default_factory=HeldOut)

    def of_event(self, line: Mapping[str, Any]) -> Iterator[Alert]:
        key, t = f"{line['position']}/{line['n']}", float(line["t"])
        for kind, step, text in self._found(line):
            alert = Alert(kind, key, text, t, step)
            if self.wants(alert):
                yield alert

    def wants(self, alert: Alert) -> bool:
        """False if its kind is not wanted, or was told a short time ago."""
        quiet = alert.t - self._told.get(alert.kind, -math.inf) < QUIET_S
        if alert.kind not in self.config.on or (quiet and alert.kind != "end"):
            return False
        self._told[alert.kind] = alert.t
        return True

    def _found(self, line: Mapping[str, Any]) -> Iterator[tuple[AlertKind, int, str]]:
        kind, step = line["type"], int(line.get("step") or 0)
        if kind in ENDS:
            yield "end", step, line["text"]
        elif line.get("severity") in ("warning", "error"):
            yield "fault", step, line["text"]
        for warned in self._held_out.take(kind, line):
            yield warned.kind, warned.step, warned.text
        metrics = line.get("metrics") if kind == EventType.STEP_COMMITTED else None
        if not metrics:
            return
        # The line has null for what is not finite.
        gone = [n for n in ("loss", "grad_norm", "reward_mean") if metrics.get(n, 0.0) is None]
        if gone or metrics.get("update_skipped"):
            what = f"{' and '.join(gone)} not finite" if gone else "gradient not finite: no update"
            yield "nan", step, f"step {step}: {what}"
        if (reward := metrics.get("reward_mean")) is not None:
            self._rewards.append(reward)
        if len(self._rewards) == WINDOW and self.config.reward_drop:
            mean = fmean(self._rewards)
            self._best = max(self._best, mean)
            before = self._collapsed
            self._collapsed = self._best - mean > self.config.reward_drop * abs(self._best)
            if self._collapsed and not before:
                text = f"mean reward of {WINDOW} steps is {mean:.3f}, it was {self._best:.3f}"
                yield "reward_collapse", step, text


class NotDelivered(Exception):
    """The webhook or the command did not take the alert. The text names no secret."""


def deliver(config: AlertsConfig, message: Mapping[str, Any]) -> None:
    """Sends to webhook and command. Raises NotDelivered if one fails; the other got it anyway."""
    body = json.dumps(message).encode()
    posted = _post(Path(config.webhook_file), body) if config.webhook_file is not None else ""
    ran = _run(config.command, body) if config.command else ""
    if posted or ran:
        raise NotDelivered("; ".join(filter(None, (posted, ran))))


def _post(file: Path, body: bytes) -> str:
    """The problem; empty if the webhook has taken it."""
    try:
        url = file.read_text(encoding="utf-8").strip()
    except OSError as error:
        return f"alerts.webhook_file cannot be read: {error.strerror}"
    if not url.startswith(("http://", "https://")):
        return "alerts.webhook_file must contain one http:// or https:// URL"
    try:
        request = Request(url, body, {"Content-Type": "application/json"}, method="POST")
        urlopen(request, timeout=TIMEOUT_S).close()
    except HTTPError as error:
        return f"the webhook answered {error.code}"
    except (OSError, ValueError, HTTPException) as error:
        return f"the webhook did not answer ({type(error).__name__})"
    return ""


def _run(command: list[str], body: bytes) -> str:
    try:
        done = subprocess.run(command, input=body, timeout=TIMEOUT_S, capture_output=True)
    except subprocess.TimeoutExpired:
        return f"alerts.command took longer than {TIMEOUT_S:g} s"
    except OSError as error:
        return f"alerts.command cannot be run: {error.strerror}"
    return f"alerts.command ended with status {done.returncode}" if done.returncode else ""


class AlertThread(Drain[dict[str, Any]]):
    """Takes lines of events: records with position, n and t. ``progress`` returns the last step of
    a run that is to make progress; None: it has ended, or is paused or stopped for now."""

    def __init__(
        self,
        config: AlertsConfig,
        run: str,
        run_dir: Path,
        progress: Callable[[], int | None],
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
        self._step: int | None = None  # Step at ``_step_since``, in monotonic seconds
        self._step_since = 0.0

    def _serve(self) -> None:
        with suppress(OSError, ValueError):
            self._place = dict(json.loads(self._path.read_text(encoding="utf-8")))
        self._since = 0.0 if self._place else time.time() - OLD_S
        self._survive(self._take, read_lines(self._run_dir / "events.jsonl"))
        for lines in self._batches():
            self._survive(self._take, lines)
            if not self._closing.is_set():
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
                for alert in alerts:
                    if alert.t >= self._since:
                        self._send(alert)

    def _look(self) -> None:
        """Tells states of the run."""
        step, now = self._progress(), time.monotonic()
        if step != self._step:
            self._step, self._step_since = step, now
        waited, told = now - self._step_since, self._place.setdefault("told", {})
        if step is not None and waited > self._config.stall_s:
            text = f"no step was committed for {waited:.0f} s; the last one was step {step}"
            self._tell("stall", str(step), text)
        free_gb = shutil.disk_usage(self._run_dir).free / 1e9
        if free_gb < self._config.disk_free_gb:
            key = told.get("disk") or str(int(time.time()))
            self._tell("disk", key, f"{free_gb:.1f} GB are free in the run directory")
        elif free_gb > 1.2 * self._config.disk_free_gb:
            told.pop("disk", None)

    def _tell(self, kind: AlertKind, key: str, text: str) -> None:
        """Once, also if another leader told it."""
        told, alert = self._place["told"], Alert(kind, key, text, time.time(), self._step or 0)
        if told.get(kind) != key:
            told[kind] = key
            if self._rules.wants(alert):
                self._send(alert)

    def _send(self, alert: Alert) -> None:
        for number in range(TRIES):
            if not self._may_write():
                return
            try:
                deliver(self._config, alert.message(self._run))
                event(log, "alert sent", kind=alert.kind, id=alert.key)
                break
            except NotDelivered as why:
                last = number == TRIES - 1
                level = logging.ERROR if last else logging.WARNING
                event(log, "alert not delivered", level, kind=alert.kind, id=alert.key, why=why)
            pause_s = self._first_pause_s * 4**number
            if not last and self._closing.wait(pause_s):
                time.sleep(min(pause_s, LAST_PAUSE_S))  # the process ends soon
        if self._may_write():
            self._survive(replace_file, self._path, json.dumps(self._place).encode())
