"""Diagnosis of a role without a worker at work: what those that start wait for, or that none
starts."""

from __future__ import annotations

from functools import partial

from controller.diagnosis.diagnosis import (
    Culprit,
    CulpritKind,
    Diagnosis,
    finding,
    seconds,
)
from controller.diagnosis.evidence import Evidence, SessionlessEvidence
from controller.ledger.enums import Lifecycle, Role
from controller.ledger.role_traits import TRAITS
from paceline.observe.vocabulary import Severity
from paceline.process.waits import WaitKind

START_S = 20.0  # importing torch and transformers takes seconds
_FAULTS = {
    WaitKind.HUB: (
        CulpritKind.HUB,
        "Check HF_ENDPOINT and the network to it, or set model.path to a local directory",
    ),
    WaitKind.MODEL: (CulpritKind.MODEL, "Check the disk or mount behind model.path"),
    WaitKind.REWARD: (
        CulpritKind.REWARD,
        "See what its import does: paceline stacks {name}; reward.functions names it",
    ),
    WaitKind.DATASET: (CulpritKind.DATASET, ""),
}
"""Culprit and remedy of waits whose fault is not the worker's own."""


def _absent(role: Role, e: Evidence) -> Diagnosis | None:
    if any(w.role is role and w.lifecycle is not Lifecycle.STARTING for w in e.workers):
        return None
    worker = f"a {TRAITS[role].words}"
    if not e.desired.get(role, 1):
        user, remedy = Culprit(CulpritKind.USER, worker), f"paceline scale {role}=1"
        because, since_s = f"because the desired number is 0 (fleet.{role})", e.since_commit_s
        return Diagnosis("the run", user, because, since_s, "", remedy, Severity.ERROR)
    starting = [p for p in e.sessionless if p.role is role and p.waits]
    if starting:
        # The one that is nearest to its end may be any; the oldest wait is the likeliest fault.
        return _starts(max(starting, key=lambda p: p.waits[0].age_s))
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


def _starts(process: SessionlessEvidence) -> Diagnosis:
    """The run waits for a process that starts, or for what that process waits for."""
    # The most telling wait: loading a model marks the whole start, what blocks inside it is newer.
    wait = next((w for w in process.waits if w.kind in _FAULTS), process.waits[0])
    name = process.worker_id
    culprit = Culprit(CulpritKind.STARTING_WORKER, name, process.host, process.pid)
    because, remedy = wait.what, f"See what it does: paceline stacks {name}"
    if wait.kind in _FAULTS:
        kind, remedy = _FAULTS[wait.kind]
        if wait.kind is not WaitKind.MODEL:
            culprit, because = Culprit(kind, wait.of), f"{culprit.words} is {wait.what}"
    following = f"{name} joins the run once that is done, or ends with an error that names it"
    if wait.left_s is not None:
        following = f"{name} gives up in {seconds(wait.left_s)}"
    remedy, late, stuck = remedy.format(name=name), wait.age_s > START_S, Severity.ERROR
    return finding(
        "the run", culprit, because, wait.age_s, following, remedy, late=late, severity=stuck
    )


def _none_registered(e: Evidence, role: Role, worker: str) -> Diagnosis:
    dead = [w for w in e.state.fleet.workers.values() if w.role is role and not w.alive]
    culprit, name = Culprit(CulpritKind.WORKER, worker), f"{role}-0"
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
    remedy, severity = "", Severity.WARNING
    if e.since_commit_s > START_S:
        severity = Severity.ERROR
        remedy = (
            f"paceline logs --run-dir DIR {name} shows why it is not up; "
            f"paceline {role} starts one by hand"
        )
    return Diagnosis("the run", culprit, because, e.since_commit_s, following, remedy, severity)
