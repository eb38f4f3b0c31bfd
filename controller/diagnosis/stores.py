"""Diagnoses of the controller's own side: Redis, payloads, the data set, the leader's lease."""

from __future__ import annotations

from controller.diagnosis.diagnosis import Culprit, CulpritKind, Diagnosis, Urgency, seconds
from controller.diagnosis.evidence import Evidence, WorkerEvidence
from paceline.process.waits import Wait, WaitKind
from paceline.redis.trouble import FULL, remedy_of

STORE_S = 1.0
"""An append takes milliseconds."""
DATASET_S = 2.0


def redis(e: Evidence) -> Diagnosis | None:
    wait = e.own_wait(WaitKind.STORE)
    slow_s = wait.age_s if wait is not None else 0.0
    if "Redis" not in e.trouble and slow_s < STORE_S:
        return None
    stopped = e.redis_kernel is not None and e.redis_kernel.stopped
    if remedy := remedy_of(e.trouble):
        full = e.trouble == FULL
        because = "which is full and refuses writes" if full else "which cannot write to its disk"
    elif stopped:
        because, remedy = "which is stopped", f"Continue it: kill -CONT {e.redis_pid}"
    else:
        how = e.trouble.rpartition("(")[2].rstrip(")") if "(" in e.trouble else ""
        because = f"which does not answer ({how})" if how else "which does not answer"
        remedy = (
            "Check that the server runs and can be reached; a run's own server: paceline status"
        )
    return Diagnosis(
        "the run",
        Culprit(CulpritKind.REDIS, e.redis),
        because=because,
        since_s=max(e.trouble_s, slow_s),
        next="the leader repeats its append twice a second, and declares nobody dead meanwhile"
        if e.leads
        else "this controller follows the journal again as soon as it answers",
        remedy=remedy,
        severity=Urgency.STUCK,
    )


def payloads(e: Evidence) -> Diagnosis | None:
    """Workers wait for the store of payloads for longer than is usual."""
    kinds = WaitKind.STORE, WaitKind.PAYLOADS
    found = [(worker, wait) for worker in e.workers if (wait := worker.waits_for(*kinds))]
    worker, wait = max(found, key=lambda each: each[1].age_s, default=(None, None))
    if worker is None or wait is None or wait.age_s <= e.late_s or e.silent(worker):
        return None
    return of_payloads(e, "the run", worker, wait)


def of_payloads(e: Evidence, subject: str, worker: WorkerEvidence, wait: Wait) -> Diagnosis:
    late = wait.age_s > e.late_s
    return Diagnosis(
        subject,
        Culprit(CulpritKind.PAYLOADS, e.payloads),
        because=f"{worker.worker_id} is {wait.what}",
        since_s=wait.age_s,
        next="it goes on when the store answers: nothing is lost, and no attempt fails",
        remedy="Check that the store runs, has room and can be reached from the workers' hosts: payloads.url"
        if late
        else "",
        severity=Urgency.SLOW if late else Urgency.OK,
    )


def dataset(e: Evidence) -> Diagnosis | None:
    wait = e.own_wait(WaitKind.DATASET)
    if wait is None or wait.age_s < DATASET_S:
        return None
    opening = wait.what.startswith("opening")
    following = (
        "no controller can lead before it is open"
        if opening
        else "no task that needs these rows is leased before they are read"
    )
    if wait.left_s is not None:
        following += f"; {e.controller_id} gives up in {seconds(wait.left_s)} (data.open_timeout_s)"
    return Diagnosis(
        "the run",
        Culprit(CulpritKind.DATASET, wait.of),
        because=f"{e.controller_id} is {wait.what}",
        since_s=wait.age_s,
        next=following,
        remedy=f"Check the mount or the network behind data.path: ls {wait.of}",
        # A large data set or a hub takes its time to open.
        severity=Urgency.STUCK if not opening or wait.age_s > 10.0 else Urgency.SLOW,
    )


def leadership(e: Evidence) -> Diagnosis | None:
    """A standby's view, and a leader whose lease has run out."""
    if e.leads:
        if not e.trouble:
            return None
        return Diagnosis(
            "the run",
            Culprit(CulpritKind.CONTROLLER, e.controller_id),
            because=e.trouble,
            since_s=e.trouble_s,
            next="it or a standby takes the lease",
            severity=Urgency.STUCK,
        )
    lease = e.lease
    if e.trouble:
        culprit = Culprit(CulpritKind.CONTROLLER, e.controller_id)
        return Diagnosis("the run", culprit, e.trouble, e.trouble_s, severity=Urgency.STUCK)
    if not lease.holder:
        because = f"waits for a leader: {e.controller_id} stands by, and nobody holds the lease"
        following = "a standby takes the lease at once"
        return Diagnosis("the run", because=because, next=following, severity=Urgency.SLOW)
    leader = Culprit(CulpritKind.CONTROLLER, lease.holder, lease.host, lease.pid)
    if lease.kernel is not None and lease.kernel.stopped:
        return Diagnosis(
            "the run",
            leader,
            because="stopped while it leads",
            since_s=lease.silent_s,
            next=f"its lease runs out in {seconds(lease.left_s)}, and {e.controller_id} takes over",
            remedy=f"Continue it: kill -CONT {lease.pid} on {lease.host}",
            severity=Urgency.STUCK,
        )
    because = f"is led by {leader.words}; {e.controller_id} stands by and cannot see the workers"
    following = f"if the leader ends, its lease runs out in {seconds(lease.left_s)}"
    return Diagnosis("the run", because=because, next=following)
