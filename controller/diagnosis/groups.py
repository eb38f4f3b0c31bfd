"""Diagnosis of a step that lacks groups: which rollout worker, reward or environment holds them up."""

from __future__ import annotations

from controller.diagnosis.diagnosis import Culprit, CulpritKind, Diagnosis, Urgency, seconds
from controller.diagnosis.evidence import Evidence, WorkerEvidence
from controller.diagnosis.scorers import scorer
from controller.diagnosis.silent_workers import culprit_of, quietest, silent_worker
from controller.ledger.enums import Role
from paceline.process.waits import Wait, WaitKind

_USER_CODE = {WaitKind.REWARD: CulpritKind.REWARD, WaitKind.ENVIRONMENT: CulpritKind.ENVIRONMENT}
_HOLDING = (*_USER_CODE, WaitKind.SCORER, WaitKind.ENGINE, WaitKind.VERDICT)
"""Waits in which a worker holds tasks."""
STILL_S = 5.0


def groups(e: Evidence) -> Diagnosis | None:
    """No step is open: trainers wait for groups."""
    state = e.state
    if state.steps.open is not None or state.run_spec is None:
        return None
    ready, batch = state.ready_for_next_step, state.run.groups_per_step
    subject = f"step {state.versions.step + 1} ({ready} of {batch} groups ready)"
    workers = [w for w in e.workers if w.role is Role.ROLLOUT and not w.spare]
    if (worker := quietest(e, workers)) is not None:
        then = f"and its {worker.held} tasks go to others" if worker.held else ""
        return silent_worker(e, worker, subject, then=then)
    if workers and not state.run_spec.recorded and all(w.loaded_version < 0 for w in workers):
        return _no_weights(e, subject, workers)
    found = [(w, wait) for w in workers for wait in w.waits if wait.kind in _HOLDING]
    if not found:
        return None
    # Of what most tasks are in; of these the oldest.
    most = max(
        {wait.kind for _, wait in found},
        key=lambda kind: sum(wait.count for _, wait in found if wait.kind is kind),
    )
    worker, wait = max((f for f in found if f[1].kind is most), key=lambda f: f[1].age_s)
    if most is WaitKind.SCORER:
        return scorer(e, subject, worker, wait)
    if most in _USER_CODE:
        return _user_code(e, subject, worker, wait)
    return _worker(e, subject, worker, wait)


def _no_weights(e: Evidence, subject: str, workers: list[WorkerEvidence]) -> Diagnosis:
    """No engine has weights yet: the one that waits longest, or the worker that sends them to it."""
    first = max(workers, key=lambda w: w.waits[0].age_s if w.waits else 0.0)
    link = e.state.fleet.links.get(first.worker_id)
    source = e.of(link.publisher) if link is not None else None
    if source is not None and e.silent(source):
        return silent_worker(e, source, subject, then="and another worker sends the weights")
    wait = first.waits_for(WaitKind.WEIGHTS)
    age_s = wait.age_s if wait is not None else 0.0
    who = source.worker_id if source is not None else "a policy replica"
    return Diagnosis(
        subject,
        culprit_of(first),
        because=wait.what if wait is not None else f"which has no weights yet from {who}",
        since_s=age_s,
        next="it generates as soon as its engine has loaded them",
        remedy=f"See what both do: paceline stacks {who}, paceline stacks {first.worker_id}"
        if age_s > e.late_s
        else "",
        severity=Urgency.SLOW if age_s > e.late_s else Urgency.OK,
    )


def _user_code(e: Evidence, subject: str, worker: WorkerEvidence, wait: Wait) -> Diagnosis:
    reward = wait.kind is WaitKind.REWARD
    late = wait.age_s > e.late_s
    others = f" and {wait.count - 1} more groups" if wait.count > 1 else ""
    setting = "reward.timeout_s" if reward else "rollout.environment_timeout_s"
    following = ""
    if wait.limit_s:
        # The wait includes the queue before the call.
        left = f"in {seconds(wait.left_s)}" if wait.left_s else "after its call's time"
        following = f"the attempt fails {left} ({setting} = {wait.limit_s:g})"
    return Diagnosis(
        subject,
        Culprit(_USER_CODE[wait.kind], wait.of),
        because=f"called by {culprit_of(worker).words} for one group{others}",
        since_s=wait.age_s,
        next=following,
        remedy=f"See its stacks: paceline stacks {worker.worker_id}; "
        + (
            f"more processes (reward.processes) or a shorter {setting} help"
            if reward
            else f"{setting} limits it"
        )
        if late
        else "",
        severity=Urgency.SLOW if late else Urgency.OK,
    )


def _worker(e: Evidence, subject: str, worker: WorkerEvidence, wait: Wait) -> Diagnosis:
    hung = wait.kind is WaitKind.ENGINE and worker.still_s > STILL_S
    # Long generations are usual: only an engine that makes no token is late.
    late = hung or (wait.kind is WaitKind.VERDICT and wait.age_s > e.late_s)
    because = wait.what
    if hung:
        because = f"whose engine has made no token for {seconds(worker.still_s)}"
    following = ""
    if hung and worker.wedged_in_s is not None:
        following = f"it is declared dead in {seconds(worker.wedged_in_s)}"
    return Diagnosis(
        subject,
        culprit_of(worker),
        because=because,
        since_s=worker.still_s if hung else wait.age_s,
        next=following,
        remedy=f"See what it does: paceline stacks {worker.worker_id}" if late else "",
        severity=Urgency.SLOW if late else Urgency.OK,
    )
