"""Diagnosis as a value: what waits, since when, for whom, why, what follows, and the remedy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from paceline.observe.vocabulary import Severity

REPLIED = {Severity.INFO: "ok", Severity.WARNING: "slow", Severity.ERROR: "stuck"}
"""Severities in replies: nothing is late, something takes longer than usual, or the run or a
process stands still."""


class CulpritKind(StrEnum):
    WORKER = "worker"
    STARTING_WORKER = "starting_worker"  # it has not registered
    CONTROLLER = "controller"
    REDIS = "redis"
    PAYLOADS = "payloads"  # their store
    DATASET = "dataset"
    HUB = "hub"
    MODEL = "model"
    REWARD = "reward"
    SCORER = "scorer"
    ENVIRONMENT = "environment"
    CHECKPOINT = "checkpoint"
    NETWORK = "network"  # between the members of an epoch
    USER = "user"  # who paused the run
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Culprit:
    kind: CulpritKind = CulpritKind.NONE
    name: str = ""  # worker id, path, URL or function
    host: str = ""
    pid: int = 0

    @property
    def words(self) -> str:
        return f"{self.name} (host {self.host}, pid {self.pid})" if self.host else self.name


@dataclass(frozen=True, slots=True)
class Diagnosis:
    subject: str  # the part of the run that waits: "step 412", "the run"
    culprit: Culprit = Culprit()
    because: str = ""  # clause after the culprit: "stopped inside the all-reduce of epoch 9"
    since_s: float = 0.0
    next: str = ""
    remedy: str = ""  # advice for the user; empty: nothing is needed
    severity: Severity = Severity.INFO

    @property
    def sentence(self) -> str:
        """Everything but the remedy: "step 412 waits 38 s for policy-1 (host b, pid 812), stopped
        inside the all-reduce of epoch 9; it is declared dead in 2 s"."""
        if self.culprit.kind is CulpritKind.NONE:
            text = f"{self.subject} {self.because}".strip()
        else:
            since = f" {seconds(self.since_s)}" if self.since_s >= 0.05 else ""
            because = f", {self.because}" if self.because else ""
            text = f"{self.subject} waits{since} for {self.culprit.words}{because}"
        return f"{text}; {self.next}" if self.next else text


def finding(
    subject: str,
    culprit: Culprit,
    because: str,
    since_s: float,
    following: str = "",
    remedy: str = "",
    *,
    late: bool,
    severity: Severity = Severity.WARNING,
) -> Diagnosis:
    """A wait that is usual until it is ``late``: only then has it a remedy and a ``severity``."""
    if not late:
        remedy, severity = "", Severity.INFO
    return Diagnosis(subject, culprit, because, since_s, following, remedy, severity)


def seconds(value: float) -> str:
    """ "0.4 s", "38 s", "12 min", "3 h"."""
    if value < 9.95:
        return f"{value:.1f} s".replace(".0 s", " s")
    if value < 600:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 36_000 else f"{value / 3600:.0f} h"
