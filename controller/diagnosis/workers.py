"""Diagnosis of workers: one that does not report or takes long, and a role without a worker at
work."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from controller.diagnosis.evidence import (
    Culprit,
    CulpritKind,
    Diagnosis,
    Evidence,
    SessionlessEvidence,
    WorkerEvidence,
    finding,
    seconds,
)
from controller.ledger.enums import TRAITS, Lifecycle, Role
from controller.ledger.state.fleet import Worker
from paceline.observe.vocabulary import ATTRIBUTED, NO_FAULT, FaultCause, Severity
from paceline.process.kernel_state import KernelState
from paceline.process.waits import Wait, WaitKind
from paceline.worker_pools import role_of, scorer_of

_SHARED = (WaitKind.COLLECTIVE, WaitKind.VOTES, WaitKind.PEERS, WaitKind.STATE)
"""Waits in which a member may be because of another member."""


def quietest(e: Evidence, workers: Iterable[WorkerEvidence]) -> WorkerEvidence | None:
    """The worker that has been silent the longest; None: all report."""
    silent = [w for w in workers if e.silent(w) or w.suspect]
    return max(silent, key=lambda w: w.silent_s, default=None)


def silent_worker(
    e: Evidence,
    worker: WorkerEvidence,
    subject: str,
    *,
    peers: Iterable[WorkerEvidence] = (),
    then: str = "",
) -> Diagnosis:
    """``peers``: workers that wait for it, whose reports may say where it stands. ``then``: what
    its death leads to."""
    waited_s = [w.age_s for p in peers for w in p.waits if w.kind in _SHARED]
    left_s = worker.dead_in_s
    if worker.wedged_in_s is not None:
        left_s = min(left_s, worker.wedged_in_s)
    following = f"it is declared dead in {seconds(left_s)}" + (f", {then}" if then else "")
    remedy = (
        f"Look at what it does: {e.command(f'stacks {worker.worker_id}')}, "
        f"{e.command(f'logs {worker.worker_id}')}; check the network to {worker.host or 'its host'}"
    )
    if worker.kernel is not None and worker.kernel.stopped:
        remedy = f"Continue it: kill -CONT {worker.pid} on {worker.host}"
    since_s = max([*waited_s, worker.silent_s])
    because = _how(e, worker, peers)
    return Diagnosis(subject, worker.culprit, because, since_s, following, remedy, Severity.ERROR)


def at(what: str) -> str:
    return what if what.startswith("inside") else f"while {what}"


def _place(worker: WorkerEvidence, peers: Iterable[WorkerEvidence]) -> str:
    """Point at which it stands: "inside the all-reduce of epoch 9"."""
    if worker.waits:
        return at(worker.waits[0].what)
    # It came to the collective after its last report, or its peers would not be waiting in it.
    waits = (peer.waits_for(WaitKind.COLLECTIVE) for peer in peers)
    if (wait := next(filter(None, waits), None)) is not None:
        return at(wait.what)
    return f'at "{worker.activity}"' if worker.activity else ""


def _how(e: Evidence, worker: WorkerEvidence, peers: Iterable[WorkerEvidence]) -> str:
    place = _place(worker, peers)
    if (wait := e.stuck_loop(worker.worker_id)) is not None:
        return f"whose event loop has not run for {seconds(wait.age_s)}, {place}".rstrip(", ")
    if state := _by_kernel(worker.kernel):
        return f"{state} {place}".rstrip()
    lost = "its session broke" if worker.suspect else "silent"
    return f"{lost}, last report {seconds(worker.silent_s)} ago, {place}".rstrip(", ")


def _by_kernel(kernel: KernelState | None) -> str:
    if kernel is None:
        return ""
    return "stopped" if kernel.stopped else kernel.words if kernel.uninterruptible else ""


def slow_worker(
    e: Evidence, worker: WorkerEvidence, subject: str, wait: Wait | None, waited_s: float
) -> Diagnosis:
    """A worker that reports and that others wait for."""
    doing = wait.what if wait is not None else f'at "{worker.activity or worker.lifecycle}"'
    still = f", without progress for {seconds(worker.still_s)}" if worker.still_s >= 1.0 else ""
    following = ""
    if wait is not None and wait.left_s is not None:
        following = f"it gives up in {seconds(wait.left_s)}"
    elif worker.wedged_in_s is not None:
        following = f"if it makes no progress it is declared dead in {seconds(worker.wedged_in_s)}"
    remedy = f"See what it does: {e.command(f'stacks {worker.worker_id}')}"
    late = waited_s > e.late_s
    return finding(subject, worker.culprit, doing + still, waited_s, following, remedy, late=late)


DEATHS = frozenset(FaultCause) - NO_FAULT
START_S = 20.0  # importing torch and transformers takes seconds
LOAD_S = 180.0
_FAULTS = {
    WaitKind.HUB: (
        CulpritKind.HUB,
        "Check HF_ENDPOINT and the network to it, or set model.path to a local directory",
    ),
    WaitKind.MODEL: (CulpritKind.MODEL, "Check the disk or mount behind model.path"),
    WaitKind.REWARD: (
        CulpritKind.REWARD,
        "See what its import does; reward.functions names it",
    ),
    WaitKind.DATASET: (CulpritKind.DATASET, ""),
}
"""Culprit and remedy of waits whose fault is not the worker's own."""


def _absent(role: Role, e: Evidence) -> Diagnosis | None:
    if any(w.role is role and w.lifecycle is not Lifecycle.STARTING for w in e.workers):
        return None
    worker = f"a {TRAITS[role].words}"
    if not e.desired.get(role, 1):
        user, remedy = Culprit(CulpritKind.USER, worker), e.command(f"scale {role}=1")
        because, since_s = f"because the desired number is 0 (fleet.{role})", e.since_commit_s
        return Diagnosis("the run", user, because, since_s, "", remedy, Severity.ERROR)
    starting = [p for p in e.sessionless if p.role is role and p.waits]
    if starting:
        # The one that is nearest to its end may be any; the oldest wait is the likeliest fault.
        return _starts(e, max(starting, key=lambda p: p.waits[0].age_s))
    if any(w.kind in _FAULTS for p in e.sessionless for w in p.waits):
        # More is known of the other role, and the cause may be the same.
        return None
    registered = next((w for w in e.workers if w.role is role), None)
    if registered is not None:
        person = Culprit(
            CulpritKind.STARTING_WORKER, registered.worker_id, registered.host, registered.pid
        )
        return Diagnosis("the run", person, f'at "{registered.activity}"', e.since_commit_s)
    return _none_registered(e, role, worker)


absent_policy = partial(_absent, Role.POLICY)
absent_rollout = partial(_absent, Role.ROLLOUT)


def _starts(e: Evidence, process: SessionlessEvidence) -> Diagnosis:
    """The run waits for a process that starts, or for what that process waits for."""
    # The most telling wait: loading a model marks the whole start, what blocks inside it is newer.
    wait = next((w for w in process.waits if w.kind in _FAULTS), process.waits[0])
    name = process.worker_id
    culprit = Culprit(CulpritKind.STARTING_WORKER, name, process.host, process.pid)
    because, remedy = wait.what, f"See what it does: {e.command(f'stacks {name}')}"
    if wait.kind in _FAULTS:
        kind, advice = _FAULTS[wait.kind]
        remedy = f"{advice}. {remedy}" if advice else remedy
        if wait.kind is not WaitKind.MODEL:
            culprit, because = Culprit(kind, wait.of), f"{culprit.words} is {wait.what}"
    following = f"{name} joins the run once that is done, or ends with an error that names it"
    if wait.left_s is not None:
        following = f"{name} gives up in {seconds(wait.left_s)}"
    # A large model takes minutes to load; a hub answers, or it does not.
    late_s = START_S if wait.kind is WaitKind.HUB else LOAD_S
    severity = Severity.ERROR if wait.age_s > LOAD_S else Severity.WARNING
    late = wait.age_s > late_s
    return finding(
        "the run", culprit, because, wait.age_s, following, remedy, late=late, severity=severity
    )


def _none_registered(e: Evidence, role: Role, worker: str) -> Diagnosis:
    dead = [w for w in e.state.fleet.workers.values() if w.role is role and not w.alive]
    culprit, name = Culprit(CulpritKind.STARTING_WORKER, worker), f"{role}-0"
    because, following = "none has registered", "the run begins with the first"
    if dead:
        last = dead[-1]
        culprit, name = (
            Culprit(CulpritKind.WORKER, last.worker_id, last.host, last.pid),
            last.worker_id,
        )
        because = f"which is {last.lifecycle}, and no other {TRAITS[role].words} has registered"
        following = "its launcher starts it again"
    if e.provider_trouble:
        following = f"the provider reports: {e.provider_trouble}"
    remedy = (
        f"{e.command(f'logs {name}')} shows why it is not up; paceline {role} starts one by hand"
    )
    late, severity = bool(dead) or e.since_commit_s > START_S, Severity.WARNING
    if e.since_commit_s > START_S:
        severity = Severity.ERROR
    return finding(
        "the run",
        culprit,
        because,
        e.since_commit_s,
        following,
        remedy,
        late=late,
        severity=severity,
    )


def lost(e: Evidence) -> Diagnosis | None:
    """The run goes on with fewer workers than it should have, because some died."""
    dead: list[Worker] = []
    at_work = []
    for pool, wanted in e.desired.items():
        alive = len(e.state.fleet.living_in(pool))
        gone = [w for w in e.state.fleet.workers.values() if w.pool == pool and w.death in DEATHS]
        at_work.append(f"{min(alive, wanted)} of {wanted} {_words(pool)}")
        dead += gone[: max(0, wanted - alive)]
    if not dead:
        return None
    first, *others = dead
    because = str(first.death).replace("_", " ") if first.death in ATTRIBUTED else "cause unknown"
    if others:
        because += f", and {', '.join(w.worker_id for w in others[:5])}"
    following = (
        f"{' and '.join(at_work)} go on, and a launcher starts {'them' if others else 'it'} again"
    )
    if e.provider_trouble:
        following += f"; the provider reports: {e.provider_trouble}"
    culprit = Culprit(CulpritKind.WORKER, first.worker_id, first.host, first.pid)
    remedy, severity = f"See why: {e.command(f'logs {first.worker_id}')}", Severity.WARNING
    return Diagnosis("the run", culprit, because, 0.0, following, remedy, severity, lost=True)


def _words(pool: str) -> str:
    """Workers of a pool: "policy replicas", "scorers helpful"."""
    return f"{TRAITS[Role(role_of(pool))].words}s {scorer_of(pool)}".rstrip()
