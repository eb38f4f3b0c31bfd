"""Diagnosis of a role without a worker at work: what those that start wait for, or that none
starts."""

from __future__ import annotations

from controller.diagnosis.diagnosis import Culprit, CulpritKind, Diagnosis, Urgency, seconds
from controller.diagnosis.evidence import Evidence, SessionlessEvidence
from controller.ledger.enums import Lifecycle, Role
from controller.ledger.role_traits import TRAITS
from paceline.process.waits import Wait, WaitKind

WORDS = {role: traits.words for role, traits in TRAITS.items()}
START_S = 20.0
"""Importing torch and transformers takes seconds."""
_THINGS = {
    WaitKind.HUB: CulpritKind.HUB,
    WaitKind.MODEL: CulpritKind.MODEL,
    WaitKind.REWARD: CulpritKind.REWARD,
    WaitKind.DATASET: CulpritKind.DATASET,
}
"""Kinds of waits whose fault is not the worker's own."""
_REMEDIES = {
    WaitKind.HUB: "Check HF_ENDPOINT and the network to it, or set model.path to a local directory",
    WaitKind.MODEL: "Check the disk or mount behind model.path",
    WaitKind.REWARD: "See what its import does: paceline stacks {name}; reward.functions names it",
}


def absent_policy(e: Evidence) -> Diagnosis | None:
    return _absent(e, Role.POLICY)


def absent_rollout(e: Evidence) -> Diagnosis | None:
    return _absent(e, Role.ROLLOUT)


def _absent(e: Evidence, role: Role) -> Diagnosis | None:
    if any(w.role is role and w.lifecycle is not Lifecycle.STARTING for w in e.workers):
        return None
    if not e.desired.get(role, 1):
        return Diagnosis(
            "the run",
            Culprit(CulpritKind.USER, f"a {WORDS[role]}"),
            because=f"because the desired number is 0 (fleet.{role})",
            since_s=e.since_commit_s,
            remedy=f"paceline scale {role}=1",
            severity=Urgency.STUCK,
        )
    starting = [p for p in e.sessionless if p.role is role and p.waits]
    if starting:
        # The one that is nearest to its end may be any; the oldest wait is the likeliest fault.
        return starts(e, max(starting, key=lambda p: p.waits[0].age_s))
    if any(w.kind in _THINGS for p in e.sessionless for w in p.waits):
        # More is known of the other role, and the cause may be the same.
        return None
    registered = next((w for w in e.workers if w.role is role), None)
    if registered is not None:
        culprit = Culprit(
            CulpritKind.STARTING_WORKER, registered.worker_id, registered.host, registered.pid
        )
        return Diagnosis("the run", culprit, f'at "{registered.activity}"', e.since_commit_s)
    return _nobody(e, role)


def starts(e: Evidence, process: SessionlessEvidence) -> Diagnosis:
    """The run waits for a process that starts, or for what that process waits for."""
    # The most telling wait: loading a model marks the whole start, what blocks inside it is newer.
    wait = next((w for w in process.waits if w.kind in _THINGS), process.waits[0])
    person = Culprit(CulpritKind.STARTING_WORKER, process.worker_id, process.host, process.pid)
    late = wait.age_s > START_S
    severity = Urgency.STUCK if late else Urgency.OK
    if wait.kind in _THINGS and wait.kind is not WaitKind.MODEL:
        return Diagnosis(
            "the run",
            Culprit(_THINGS[wait.kind], wait.of),
            because=f"{person.words} is {wait.what}",
            since_s=wait.age_s,
            next=_gives_up(process, wait),
            remedy=_REMEDIES.get(wait.kind, "").format(name=process.worker_id) if late else "",
            severity=severity,
        )
    remedy = _REMEDIES.get(wait.kind) or f"See what it does: paceline stacks {process.worker_id}"
    return Diagnosis(
        "the run",
        person,
        because=wait.what,
        since_s=wait.age_s,
        next=_gives_up(process, wait),
        remedy=remedy if late else "",
        severity=severity,
    )


def _gives_up(process: SessionlessEvidence, wait: Wait) -> str:
    if wait.left_s is not None:
        return f"{process.worker_id} gives up in {seconds(wait.left_s)}"
    return (
        f"{process.worker_id} joins the run once that is done, or ends with an error that names it"
    )


def _nobody(e: Evidence, role: Role) -> Diagnosis:
    dead = [w for w in e.state.fleet.workers.values() if w.role is role and not w.alive]
    last = dead[-1] if dead else None
    culprit = Culprit(CulpritKind.WORKER, f"a {WORDS[role]}")
    because = "none has registered"
    if last is not None:
        culprit = Culprit(CulpritKind.WORKER, last.worker_id, last.host, last.pid)
        because = f"which is {last.lifecycle}, and no other {WORDS[role]} has registered"
    following = (
        "its launcher starts it again" if last is not None else "the run begins with the first"
    )
    if e.provider_trouble:
        following = f"the provider reports: {e.provider_trouble}"
    late = e.since_commit_s > START_S
    remedy = f"paceline logs --run-dir DIR {last.worker_id if last else f'{role}-0'} shows why it is not up; "
    return Diagnosis(
        "the run",
        culprit,
        because=because,
        since_s=e.since_commit_s,
        next=following,
        remedy=f"{remedy}paceline {role} starts one by hand" if late else "",
        severity=Urgency.STUCK if late else Urgency.SLOW,
    )
