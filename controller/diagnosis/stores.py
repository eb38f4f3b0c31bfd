"""Diagnoses of what processes read and write: Redis, payloads, the data set, checkpoints, and the
leader's lease."""

from controller.diagnosis.evidence import (
    Culprit,
    CulpritKind,
    Diagnosis,
    Evidence,
    WorkerEvidence,
    finding,
    seconds,
)
from controller.ledger.enums import Phase
from controller.ledger.views import at_its_end
from paceline.observe.vocabulary import Severity
from paceline.process.waits import Wait, WaitKind
from paceline.redis.client import FULL, remedy_of
from paceline.weights.weight_store import SETTING, THE_STORE

STORE_S = 1.0  # an append takes milliseconds
DATASET_S = 2.0
OPEN_S = 10.0  # a large data set or a hub takes its time to open
CHECKPOINT_S = 60.0  # writing a checkpoint takes longer only on a disk that is slow, or gone


def redis(e: Evidence) -> Diagnosis | None:
    wait = e.own_wait(WaitKind.STORE)
    slow_s = wait.age_s if wait is not None else 0.0
    if "Redis" not in e.trouble and slow_s < STORE_S:
        return None
    following = "this controller follows the journal again as soon as it answers"
    if e.leads:
        following = "the leader repeats its append twice a second, and declares nobody dead "
        following += "meanwhile"
    if remedy := remedy_of(e.trouble):
        full = e.trouble == FULL
        because = "which is full and refuses writes" if full else "which cannot write to its disk"
    elif e.redis_kernel is not None and e.redis_kernel.stopped:
        because, remedy = "which is stopped", f"Continue it: kill -CONT {e.redis_pid}"
    else:
        how = e.trouble.rpartition("(")[2].rstrip(")") if "(" in e.trouble else ""
        because = "which does not answer" + (f" ({how})" if how else "")
        own = f"a run's own server: {e.command('status')}"
        remedy = f"Check that the server runs and can be reached; {own}"
    culprit, since_s = Culprit(CulpritKind.REDIS, e.redis), max(e.trouble_s, slow_s)
    return Diagnosis("the run", culprit, because, since_s, following, remedy, Severity.ERROR)


def payloads(e: Evidence) -> Diagnosis | None:
    """Workers wait for the store of payloads for longer than is usual."""
    kinds = WaitKind.STORE, WaitKind.PAYLOADS
    found = [(worker, wait) for worker in e.workers if (wait := worker.waits_for(*kinds))]
    worker, wait = max(found, key=lambda pair: pair[1].age_s, default=(None, None))
    if worker is None or wait is None or wait.age_s <= e.late_s or e.silent(worker):
        return None
    return of_payloads(e, "the run", worker, wait)


def of_payloads(e: Evidence, subject: str, worker: WorkerEvidence, wait: Wait) -> Diagnosis:
    store, setting = e.payloads, "payloads.url"
    if wait.of == THE_STORE:
        store, setting = e.weights, SETTING
    culprit, because = Culprit(CulpritKind.PAYLOADS, store), f"{worker.worker_id} is "
    following = "it goes on when the store answers: nothing is lost, and no attempt fails"
    remedy = "Check that the store runs, has room and can be reached from the workers' hosts: "
    return finding(
        subject,
        culprit,
        because + wait.what,
        wait.age_s,
        following,
        remedy + setting,
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
    culprit, because = Culprit(CulpritKind.DATASET, wait.of), f"{e.controller_id} is {wait.what}"
    remedy = f"Check the mount or the network behind data.path: ls {wait.of}"
    severity = Severity.WARNING if opening and wait.age_s <= OPEN_S else Severity.ERROR
    return Diagnosis("the run", culprit, because, wait.age_s, following, remedy, severity)


def leadership(e: Evidence) -> Diagnosis | None:
    """A leader whose lease has run out, and a standby's view."""
    if e.trouble:
        culprit, stuck = Culprit(CulpritKind.CONTROLLER, e.controller_id), Severity.ERROR
        following = "it or a standby takes the lease" if e.leads else ""
        return Diagnosis("the run", culprit, e.trouble, e.trouble_s, following, severity=stuck)
    if e.leads:
        return None
    if not e.leader:
        because = f"waits for a leader: {e.controller_id} stands by, and nobody holds the lease"
        following = "a standby takes the lease at once"
        return Diagnosis("the run", because=because, next=following, severity=Severity.WARNING)
    because = f"is led by {e.leader}; {e.controller_id} stands by and cannot see the workers"
    return Diagnosis("the run", because=because)


def checkpoint(e: Evidence) -> Diagnosis | None:
    """A checkpoint that is being written; what a stopping run waits for last."""
    stopping = e.state.phase in (Phase.STOPPING, Phase.SUSPENDING) or at_its_end(e.state)
    subject, following = "the next checkpoint", "training goes on meanwhile"
    if stopping:
        subject, following = "the end of the run", "the run ends once it is on disk"
    for worker in e.workers:
        wait = worker.waits_for(WaitKind.CHECKPOINT)
        if wait is None or not wait.what.startswith("writing"):
            continue
        if stopping or wait.age_s >= CHECKPOINT_S:
            culprit = Culprit(CulpritKind.CHECKPOINT, wait.of)
            because = f"{worker.words} is {wait.what}"
            remedy = f"Check the disk behind it: df {wait.of}"
            late = wait.age_s > CHECKPOINT_S
            return finding(subject, culprit, because, wait.age_s, following, remedy, late=late)
    return None
