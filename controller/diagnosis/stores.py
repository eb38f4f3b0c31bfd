"""Diagnoses of the controller's own side: Redis, payloads, the data set, the leader's lease."""

from __future__ import annotations

from controller.diagnosis.evidence import (
    Culprit,
    CulpritKind,
    Diagnosis,
    Evidence,
    WorkerEvidence,
    finding,
    seconds,
)
from paceline.observe.vocabulary import Severity
from paceline.process.waits import Wait, WaitKind
from paceline.redis.client import FULL, remedy_of

STORE_S = 1.0  # an append takes milliseconds
DATASET_S = 2.0


def redis(e: Evidence) -> Diagnosis | None:
    wait = e.own_wait(WaitKind.STORE)
    slow_s = wait.age_s if wait is not None else 0.0
    if "Redis" not in e.trouble and slow_s < STORE_S:
        return None
    following = "this controller follows the journal again as soon as it answers"
    if e.leads:
        following = (
            "the leader repeats its append twice a second, and declares nobody dead meanwhile"
        )
    if remedy := remedy_of(e.trouble):
        full = e.trouble == FULL
        because = "which is full and refuses writes" if full else "which cannot write to its disk"
    elif e.redis_kernel is not None and e.redis_kernel.stopped:
        because, remedy = "which is stopped", f"Continue it: kill -CONT {e.redis_pid}"
    else:
        how = e.trouble.rpartition("(")[2].rstrip(")") if "(" in e.trouble else ""
        because = "which does not answer" + (f" ({how})" if how else "")
        remedy = "Check that the server runs and can be reached; a run's own server: " + e.command(
            "status"
        )
    culprit, since_s = Culprit(CulpritKind.REDIS, e.redis), max(e.trouble_s, slow_s)
    return Diagnosis("the run", culprit, because, since_s, following, remedy, Severity.ERROR)


def payloads(e: Evidence) -> Diagnosis | None:
    """Workers wait for the store of payloads for longer than is usual."""
    kinds = WaitKind.STORE, WaitKind.PAYLOADS
    found = [(worker, wait) for worker in e.workers if (wait := worker.waits_for(*kinds))]
    if not found:
        return None
    worker, wait = max(found, key=lambda pair: pair[1].age_s)
    late = wait.age_s > e.late_s and not e.silent(worker)
    return of_payloads(e, "the run", worker, wait) if late else None


def of_payloads(e: Evidence, subject: str, worker: WorkerEvidence, wait: Wait) -> Diagnosis:
    return finding(
        subject,
        Culprit(CulpritKind.PAYLOADS, e.payloads),
        f"{worker.worker_id} is {wait.what}",
        wait.age_s,
        "it goes on when the store answers: nothing is lost, and no attempt fails",
        "Check that the store runs, has room and can be reached from the workers' hosts: "
        "payloads.url",
        late=wait.age_s > e.late_s,
    )


def dataset(e: Evidence) -> Diagnosis | None:
    wait = e.own_wait(WaitKind.DATASET)
    if wait is None or wait.age_s < DATASET_S:
        return None
    opening = wait.what.startswith("opening")
    following = "no task that needs these rows is leased before they are read"
    if opening:
        following = "no controller can lead before it is open"
    if wait.left_s is not None:
        following += f"; {e.controller_id} gives up in {seconds(wait.left_s)} (data.open_timeout_s)"
    return Diagnosis(
        "the run",
        Culprit(CulpritKind.DATASET, wait.of),
        f"{e.controller_id} is {wait.what}",
        wait.age_s,
        following,
        f"Check the mount or the network behind data.path: ls {wait.of}",
        # A large data set or a hub takes its time to open.
        Severity.ERROR if not opening or wait.age_s > 10.0 else Severity.WARNING,
    )


def leadership(e: Evidence) -> Diagnosis | None:
    """A standby's view, and a leader whose lease has run out."""
    if e.trouble:
        culprit = Culprit(CulpritKind.CONTROLLER, e.controller_id)
        following = "it or a standby takes the lease" if e.leads else ""
        since_s, stuck = e.trouble_s, Severity.ERROR
        return Diagnosis("the run", culprit, e.trouble, since_s, following, severity=stuck)
    lease = e.lease
    if e.leads:
        return None
    if not lease.holder:
        because = f"waits for a leader: {e.controller_id} stands by, and nobody holds the lease"
        following = "a standby takes the lease at once"
        return Diagnosis("the run", because=because, next=following, severity=Severity.WARNING)
    leader = Culprit(CulpritKind.CONTROLLER, lease.holder, lease.host, lease.pid)
    ends = f"its lease runs out in {seconds(lease.left_s)}"
    if lease.kernel is not None and lease.kernel.stopped:
        because, following = "stopped while it leads", f"{ends}, and {e.controller_id} takes over"
        remedy, stuck = f"Continue it: kill -CONT {lease.pid} on {lease.host}", Severity.ERROR
        return Diagnosis("the run", leader, because, lease.silent_s, following, remedy, stuck)
    because = f"is led by {leader.words}; {e.controller_id} stands by and cannot see the workers"
    return Diagnosis("the run", because=because, next=f"if the leader ends, {ends}")
