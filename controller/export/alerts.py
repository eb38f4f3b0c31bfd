"""Alerts: the events and states of a run that are worth one, and the thread that sends them while
this process leads.

    projection ── events, states ──┬── rules ──► webhook, command ──► place (alerts.json)
    last commit, free disk ────────┘

One alert a kind in ``QUIET_S``, but the end of the run always. A state is told when it begins. The
place is written after an alert is delivered or given up. The next leader goes on from there, so an
alert is sent at least once, with the same id.
"""

import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from controller.export.alert_delivery import Alert, NotDelivered, deliver
from paceline.config.sections.services import AlertKind, AlertsConfig
from paceline.observe.event_history import ENDS, MOST_EVENTS, ListedEvent
from paceline.observe.projection import Projection, Projector
from paceline.observe.vocabulary import EventType
from paceline.process.files import replace_file
from paceline.process.structured_log import event
from paceline.process.threads import Drain

log = logging.getLogger(__name__)

QUIET_S = 300.0
TRIES = 5
FIRST_PAUSE_S = 1.0
LAST_PAUSE_S = 0.5  # between tries once the run is over
OLD_S = 600.0  # without a place, alerts are new to the run: what is older than this is not told


def _not_finite(run: Projection, happened: ListedEvent) -> str:
    step, rows = happened.step, run.metrics.rows(happened.step - 1, 1)
    if happened.type != EventType.STEP_COMMITTED or not rows or rows[0]["step"] != step:
        return ""
    gone = [n for n in ("loss", "grad_norm", "reward_mean") if rows[0].get(n, 0.0) is None]
    if gone:
        return f"step {step}: {' and '.join(gone)} not finite"
    skipped = rows[0].get("update_skipped")
    return f"step {step}: gradient not finite: no update" if skipped else ""


EVENT_RULES: Mapping[AlertKind, Callable[[Projection, ListedEvent], str]] = {
    "end": lambda run, e: e.text if e.type in ENDS else "",
    "fault": lambda run, e: e.text if e.is_fault and e.type not in ENDS else "",
    "nan": _not_finite,
}
"""Text of an alert of each kind for an event; empty: none."""

States = dict[str, tuple[AlertKind, str]]
"""Kind and text of the states that hold, by what they are about."""


@dataclass(slots=True)
class AlertRules:
    """Rules of one run: its projection in, alerts out. The place is kept for the next leader."""

    config: AlertsConfig
    place: dict[str, Any] = field(default_factory=dict)
    since: float = 0.0  # Events before are not told. Unix seconds.

    def __post_init__(self) -> None:
        """The place has the newest event looked at, the step at which each state began that was
        told, by what it is about, and the time of the newest alert of each kind."""
        self.place = {"events": [[], -1], "told": {}, "sent": {}} | self.place

    def next(self, run: Projection, others: States | None = None) -> Alert | None:
        """The next alert of an event, or of a state that holds and was not told yet. ``others``:
        states that the projection does not know; None: alerts of events only."""
        position, n = self.place["events"]
        for happened in run.history.after((tuple(position), n), limit=MOST_EVENTS):
            self.place["events"] = happened.key
            for kind, rule in EVENT_RULES.items():
                if (text := rule(run, happened)) and self._wants(kind, happened.t):
                    return Alert(kind, happened.id, text, happened.t, happened.step)
        if others is None:
            return None
        fallen = run.held_out.fallen
        states: States = {"held_out": ("held_out", fallen)} if fallen else {}
        states |= others
        told = self.place["told"] = {a: n for a, n in self.place["told"].items() if a in states}
        for about, (kind, text) in states.items():
            if about not in told:
                told[about] = run.step
                if self._wants(kind, now := time.time()):
                    return Alert(kind, str(run.step), text, now, run.step)
        return None

    def _wants(self, kind: AlertKind, t: float) -> bool:
        """False if the kind is not wanted, or was told a short time ago."""
        quiet = t - self.place["sent"].get(kind, -math.inf) < QUIET_S
        if kind not in self.config.on or (quiet and kind != "end") or t < self.since:
            return False
        self.place["sent"][kind] = t
        return True


class AlertThread(Drain[None]):
    """``progress`` returns the last step of a run that is to make progress; None: it has ended, or
    is paused or stopped for now."""

    def __init__(
        self,
        config: AlertsConfig,
        run: str,
        run_dir: Path,
        projector: Projector,
        progress: Callable[[], int | None],
        *,
        may_write: Callable[[], bool],
        first_pause_s: float = FIRST_PAUSE_S,
        poll_s: float = 1.0,
    ) -> None:
        super().__init__("alerts", poll_s=poll_s)
        self._config, self._run, self._run_dir = config, run, run_dir
        self._projector, self._progress, self._may_write = projector, progress, may_write
        self._first_pause_s = first_pause_s
        self._path = run_dir / "alerts.json"
        self._rules = AlertRules(config, since=time.time() - OLD_S)
        self._step: int | None = None  # Step at ``_step_since``, in monotonic seconds
        self._step_since = 0.0

    def _serve(self) -> None:
        with suppress(OSError, ValueError):
            self._rules = AlertRules(self._config, dict(json.loads(self._path.read_text("utf-8"))))
        for _ in self._batches():
            self._survive(self._look)

    def _survive(self, part: Callable[..., object], *arguments: Any) -> None:
        try:
            part(*arguments)
        except Exception as error:  # a disk that fails for a moment costs no other alert
            event(log, "alerts interrupted", logging.ERROR, why=str(error))

    def _look(self) -> None:
        # States are the next leader's, except those that begin with the end of the run.
        last = None if self._outcome is None else States()
        others = last if self._closing.is_set() else self._others()
        asked = partial(self._projector.begin_ask, lambda run: self._rules.next(run, others))
        while alert := asked().result():
            self._send(alert)

    def _others(self) -> States:
        """States that no projection knows. One that was told holds on under the next leader."""
        states, told = States(), self._rules.place["told"]
        step, now = self._progress(), time.monotonic()
        if step != self._step:
            self._step, self._step_since = step, now
        waited = now - self._step_since
        if step is not None and (waited > self._config.stall_s or told.get("stall") == step):
            text = f"no step was committed for {waited:.0f} s; the last one was step {step}"
            states["stall"] = "stall", text
        with suppress(OSError):  # a disk that does not answer costs no other alert
            free_gb = shutil.disk_usage(self._run_dir).free / 1e9
            if free_gb < self._config.disk_free_gb * (1.2 if "disk" in told else 1.0):
                states["disk"] = "disk", f"{free_gb:.1f} GB are free in the run directory"
        return states

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
            self._survive(replace_file, self._path, json.dumps(self._rules.place).encode())
