"""Evidence for a diagnosis (the ledger's state, reports, liveness, stores and the kernel), and the
diagnosis: what waits, since when, for whom, why, what follows, and the remedy. Values only."""

import math
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from controller.ledger.enums import Lifecycle, Role
from controller.ledger.state.state import State
from paceline.config.sections.workers import FleetConfig
from paceline.observe.vocabulary import Severity
from paceline.process.kernel_state import KernelState
from paceline.process.waits import Wait, WaitKind


class CulpritKind(StrEnum):
    WORKER = "worker"
    STARTING_WORKER = "starting_worker"  # it has not registered
    CONTROLLER = "controller"
    REDIS = "redis"
    PAYLOADS = "payloads"  # their store
    DATASET = "dataset"
    HUB = "hub"
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
    lost: bool = False  # The run goes on without the culprit

    @property
    def at_work(self) -> bool:
        """The run waits for nobody, and nothing is wrong with it."""
        return self.culprit.kind is CulpritKind.NONE and self.severity is Severity.INFO

    @property
    def sentence(self) -> str:
        """Everything but the remedy: "step 412 waits 38 s for policy-1 (host b, pid 812), stopped
        inside the all-reduce of epoch 9; it is declared dead in 2 s"."""
        if self.culprit.kind is CulpritKind.NONE:
            text = f"{self.subject} {self.because}".strip()
        else:
            since = f" {seconds(self.since_s)}" if self.since_s >= 0.05 else ""
            because = f", {self.because}" if self.because else ""
            verb = "has lost" if self.lost else f"waits{since} for"
            text = f"{self.subject} {verb} {self.culprit.words}{because}"
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
    """A wait that is usual until it is ``late``: only then has it a remedy, a ``severity``, and
    something that follows. What would follow a fault alarms people whose run is well."""
    if not late:
        following, remedy, severity = "", "", Severity.INFO
    return Diagnosis(subject, culprit, because, since_s, following, remedy, severity)


def seconds(value: float) -> str:
    """ "0.4 s", "38 s", "12 min", "3 h"."""
    if value < 9.95:
        return f"{value:.1f} s".replace(".0 s", " s")
    if value < 600:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 36_000 else f"{value / 3600:.0f} h"


SILENT_BEATS = 3.0
"""Heartbeats that a healthy worker never misses on a machine that is not overloaded."""
SILENT_S = 1.0


@dataclass(frozen=True, slots=True)
class WorkerEvidence:
    worker_id: str
    role: Role
    host: str = ""
    pid: int = 0
    waits: tuple[Wait, ...] = ()  # The oldest first. Ages are as of now, for a silent worker too.
    lifecycle: Lifecycle = Lifecycle.RUNNING
    heard: bool = True  # the worker has sent a report to this leader
    silent_s: float = 0.0
    dead_in_s: float = math.inf  # until it is declared dead if it stays silent
    suspect: bool = False  # the worker's session broke
    still_s: float = 0.0  # busy without progress for so long
    wedged_in_s: float | None = None
    activity: str = ""
    mesh_epoch: int = 0  # epoch that it has formed; 0: none
    loaded_version: int = -1
    held: int = 0  # tasks that are leased to it
    spare: bool = False
    kernel: KernelState | None = None  # if it runs on this machine and is silent

    def culprit(self, kind: CulpritKind = CulpritKind.WORKER) -> Culprit:
        return Culprit(kind, self.worker_id, self.host, self.pid)

    @property
    def words(self) -> str:
        return self.culprit().words

    def waits_for(self, *kinds: WaitKind) -> Wait | None:
        return next((wait for wait in self.waits if wait.kind in kinds), None)


@dataclass(frozen=True, slots=True)
class Evidence:
    state: State
    limits: FleetConfig
    controller_id: str = "controller-0"
    leads: bool = True
    trouble: str = ""  # reason for which this controller can decide nothing now
    trouble_s: float = 0.0
    redis: str = "Redis"
    payloads: str = "the payload store"
    weights: str = "the weight store"
    redis_kernel: KernelState | None = None
    redis_pid: int = 0
    leader: str = ""  # who leads, as a standby knows; empty: nobody
    own_waits: tuple[Wait, ...] = ()
    workers: tuple[WorkerEvidence, ...] = ()
    now_t: float = 0.0  # Unix seconds
    since_commit_s: float = 0.0  # since the newest commit, or since the run began
    usual_step_s: float = 0.0  # 0: unknown
    provider_trouble: str = ""
    pace: str = ""
    unlearned: str = ""  # Why the last steps taught the policy nothing; empty: they did
    run_dir: str = ""  # Run directory as commands name it
    desired: dict[str, int] = field(default_factory=dict)

    def silent(self, worker: WorkerEvidence) -> bool:
        return worker.silent_s > max(SILENT_S, SILENT_BEATS * self.limits.heartbeat_s)

    def quietest(self, workers: Iterable[WorkerEvidence]) -> WorkerEvidence | None:
        """The worker that has been silent the longest; None: all report."""
        silent = [w for w in workers if self.silent(w) or w.suspect]
        return max(silent, key=lambda w: w.silent_s, default=None)

    def of(self, worker_id: str) -> WorkerEvidence | None:
        return next((w for w in self.workers if w.worker_id == worker_id), None)

    def command(self, words: str) -> str:
        """``paceline`` and ``words``, as a user can type it."""
        return f"paceline {words} --run-dir {shlex.quote(self.run_dir)}"

    def look_at(self, worker_id: str) -> str:
        return f"See what it does: {self.command(f'stacks {worker_id}')}"

    def own_wait(self, kind: WaitKind) -> Wait | None:
        return next((wait for wait in self.own_waits if wait.kind is kind), None)

    @property
    def late_s(self) -> float:
        """A wait that lasts longer is not usual."""
        return max(5.0, 5.0 * self.usual_step_s)
