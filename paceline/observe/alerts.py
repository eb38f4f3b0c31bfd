"""Alerts: the events and states of a run that are worth one, and their delivery.

One alert a kind in ``QUIET_S``; the next one tells how many were held back. What is true once is
told once: the end of the run always. The webhook's address is a secret (chat services put a key
into it): no message and no error contains it.
"""

from __future__ import annotations

import json
import math
import subprocess
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.config.sections.services import AlertKind, AlertsConfig
from paceline.observe.event_history import ENDS
from paceline.observe.held_out import HeldOut
from paceline.observe.vocabulary import EventType

QUIET_S = 300.0
WINDOW = 10  # steps whose mean reward is compared
TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Alert:
    kind: AlertKind
    key: str  # journal position, or what the alert is about: the same however often it is sent
    text: str
    t: float  # Unix seconds
    step: int = 0
    held_back: int = 0  # alerts of this kind since the last one that was sent

    def message(self, run: str) -> dict[str, Any]:
        """The alert as JSON. ``text`` is what chat services show."""
        more = f" (and {self.held_back} more before it)" if self.held_back else ""
        return {
            "text": f"[{run}] {self.kind.replace('_', ' ')}: {self.text}{more}",
            "run": run,
            "kind": self.kind,
            "id": f"{run}/{self.kind}/{self.key}",
            "step": self.step,
            "t": self.t,
            "held_back": self.held_back,
        }


@dataclass(slots=True)
class AlertRules:
    """Rules of one run. Pure: event records in, alerts out."""

    config: AlertsConfig
    _told: dict[str, tuple[float, int]] = field(default_factory=dict)
    """By kind: time of the last alert, and number of those held back since."""
    _rewards: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _best: float = -math.inf
    _collapsed: bool = False
    _held_out: HeldOut = field(default_factory=HeldOut)

    def of_event(self, event: Mapping[str, Any]) -> Iterator[Alert]:
        """``event``: a line of events.jsonl, which has null for what is not finite."""
        key, t = f"{event.get('position')}/{event.get('n')}", float(event.get("t", 0.0))
        step, text = int(event.get("step") or 0), str(event.get("text", ""))
        kind, fault = event.get("type", ""), event.get("severity") in ("warning", "error")
        if kind in ENDS or fault:
            yield from self.tell(Alert("end" if kind in ENDS else "fault", key, text, t, step))
        for warned in self._held_out.take(kind, event):
            yield from self.tell(Alert(warned.kind, key, warned.text, t, warned.step))
        metrics = event.get("metrics") if kind == EventType.STEP_COMMITTED else None
        if not metrics:
            return
        names = ("loss", "grad_norm", "reward_mean")
        gone = [n for n in names if not math.isfinite(_number(metrics.get(n, 0.0)))]
        if gone or metrics.get("update_skipped"):
            what = f"{' and '.join(gone)} not finite" if gone else "gradient not finite: no update"
            yield from self.tell(Alert("nan", key, f"step {step}: {what}", t, step))
        if text := self._collapse(_number(metrics.get("reward_mean"))):
            yield from self.tell(Alert("reward_collapse", key, text, t, step))

    def tell(self, alert: Alert) -> Iterator[Alert]:
        """``alert``, unless its kind is not wanted or was told a short time ago."""
        if alert.kind not in self.config.on:
            return
        last, held_back = self._told.get(alert.kind, (-math.inf, 0))
        if alert.kind != "end" and alert.t - last < QUIET_S:
            self._told[alert.kind] = last, held_back + 1
            return
        self._told[alert.kind] = alert.t, 0
        yield replace(alert, held_back=held_back)

    def _collapse(self, reward: float) -> str:
        if math.isfinite(reward):
            self._rewards.append(reward)
        if len(self._rewards) < WINDOW or not self.config.reward_drop:
            return ""
        mean = fmean(self._rewards)
        self._best = max(self._best, mean)
        low = self._best - mean > self.config.reward_drop * abs(self._best)
        fresh, self._collapsed = low and not self._collapsed, low
        past = f"mean reward of the last {WINDOW} steps is {mean:.3f}, it was {self._best:.3f}"
        return past if fresh else ""


class NotDelivered(Exception):
    """The webhook or the command did not take the alert. The text names no secret."""


def deliver(config: AlertsConfig, message: Mapping[str, Any]) -> None:
    """Sends to webhook and command. Raises NotDelivered if one fails; the other got it anyway."""
    body = json.dumps(message).encode()
    posted = _post(Path(config.webhook_file), body) if config.webhook_file is not None else ""
    run = _run(config.command, body) if config.command else ""
    if problems := "; ".join(filter(None, (posted, run))):
        raise NotDelivered(problems)


def _post(file: Path, body: bytes) -> str:
    """The problem; empty if the webhook has taken it."""
    try:
        url = file.read_text(encoding="utf-8").strip()
    except OSError as error:
        return f"alerts.webhook_file cannot be read: {error.strerror}"
    if not url.startswith(("http://", "https://")):
        return "alerts.webhook_file must contain one http:// or https:// URL"
    try:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(url, body, headers, method="POST")
        urllib.request.urlopen(request, timeout=TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        return f"the webhook answered {error.code}"
    except (OSError, ValueError) as error:
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


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
