"""Diagnoses of the mesh and of the open step: which member the others wait for."""

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
from controller.diagnosis.stores import of_payloads
from controller.diagnosis.workers import at, quietest, silent_worker, slow_worker
from controller.ledger.enums import Role
from paceline.observe.vocabulary import Severity
from paceline.process.waits import WaitKind

FORM_S = 5.0
"""Forming an epoch takes less than a second; receiving the state of a large model longer."""
REDONE = "and the others do the step without it"


def stuck_rank(e: Evidence) -> Diagnosis | None:
    """Rank 0 of a replica reports, and says that another rank does not run."""
    for worker in e.workers:
        if (wait := worker.waits_for(WaitKind.RANK)) is None:
            continue
        opened = e.state.steps.open
        rank, _, how = wait.what.partition(", ")
        pid = int(wait.of) if wait.of.isdecimal() else 0
        following = f"{worker.worker_id} waits for it in its next collective"
        if (left_s := worker.wedged_in_s) is not None:
            left = f"{worker.worker_id} is declared dead in {seconds(left_s)}"
            following = f"{left} if it makes no progress"
        remedy = f"Check the device or the mount that it waits for, on {worker.host}"
        if how == "stopped":
            remedy = f"Continue it: kill -CONT {pid} on {worker.host}"
        subject = f"step {opened.step}" if opened is not None else "the run"
        name, stuck = f"{rank} of {worker.worker_id}", Severity.ERROR
        culprit = Culprit(CulpritKind.WORKER, name, worker.host, pid)
        return Diagnosis(subject, culprit, how, wait.age_s, following, remedy, stuck)
    return None


def mesh(e: Evidence) -> Diagnosis | None:
    """No epoch, a broken one, or one that its members have not all formed."""
    epoch = e.state.fleet.mesh
    if epoch is None or epoch.broken:
        replicas = [w for w in e.workers if w.role is Role.POLICY]
        subject = f"mesh epoch {1 if epoch is None else epoch.epoch + 1}"
        if (worker := quietest(e, replicas)) is not None:
            return silent_worker(e, worker, subject, then="and the others form the epoch")
        if unheard := [w for w in replicas if not w.heard]:
            return slow_worker(e, unheard[0], subject, None, unheard[0].silent_s)
        because = "is being formed: the members have reported, and generation continues"
        late = e.since_commit_s > e.late_s
        return finding(subject, Culprit(), because, 0.0, late=late)
    members = _members(e)
    late_members = [w for w in members if w.mesh_epoch != epoch.epoch]
    if not late_members:
        return None
    subject = f"mesh epoch {epoch.epoch}"
    if (worker := quietest(e, members)) is not None:
        return silent_worker(e, worker, subject, peers=_others(members, worker), then=REDONE)
    # A member that still does something else keeps those waiting that have come to meet it.
    meeting = (WaitKind.PEERS, WaitKind.STATE)
    if busy := next((w for w in late_members if w.waits_for(*meeting) is None), None):
        met = [wait.age_s for w in late_members if (wait := w.waits_for(WaitKind.PEERS))]
        wait = busy.waits[0] if busy.waits else None
        waited_s = max(met, default=wait.age_s if wait else 0.0)
        return slow_worker(e, busy, subject, wait, waited_s)
    for moving in late_members:
        if (wait := moving.waits_for(WaitKind.STATE)) is not None:
            return slow_worker(e, moving, subject, wait, wait.age_s)
    return _network(e, subject, late_members, WaitKind.PEERS)


def step(e: Evidence) -> Diagnosis | None:
    """The open step waits for votes."""
    opened, members = e.state.steps.open, _members(e)
    late = [w for w in members if opened is not None and w.worker_id not in opened.votes]
    if opened is None or not late:
        return None
    subject = f"step {opened.step}"
    if (worker := quietest(e, late)) is not None:
        then = REDONE if len(members) > 1 else "and a checkpoint is restored by its replacement"
        return silent_worker(e, worker, subject, peers=_others(members, worker), then=then)
    outside = [w for w in late if w.waits_for(WaitKind.COLLECTIVE) is None]
    if not outside and len(members) > 1:
        return _network(e, subject, late, WaitKind.COLLECTIVE)
    worker = max(outside or late, key=lambda w: w.still_s)
    wait = worker.waits[0] if worker.waits else None
    if wait is not None and wait.kind is WaitKind.PAYLOADS:
        return of_payloads(e, subject, worker, wait)
    joint = (WaitKind.COLLECTIVE, WaitKind.VOTES)
    waited = [found.age_s for w in _others(members, worker) if (found := w.waits_for(*joint))]
    return slow_worker(e, worker, subject, wait, max(waited, default=worker.still_s))


def _network(
    e: Evidence, subject: str, members: list[WorkerEvidence], kind: WaitKind
) -> Diagnosis | None:
    """All are there, and each waits for the others: what is between them."""
    waits = [wait for w in members if (wait := w.waits_for(kind)) is not None]
    if not waits:
        return None
    oldest = max(waits, key=lambda wait: wait.age_s)
    wedged = [w.wedged_in_s for w in members if w.wedged_in_s is not None]
    following = ""
    if oldest.left_s is not None:
        following = f"the epoch fails in {seconds(oldest.left_s)}, and a new one is formed"
    elif wedged:
        following = f"if nothing moves, one is declared dead in {seconds(min(wedged))}"
    names = ", ".join(w.worker_id for w in members[:5])
    return finding(
        subject,
        Culprit(CulpritKind.NETWORK, f"the network between {names}"),
        f"which all report {at(oldest.what)}",
        oldest.age_s,
        following,
        "Check that their hosts reach each other on all ports (tensor_host)",
        late=oldest.age_s > max(FORM_S, e.late_s),
    )


def _members(e: Evidence) -> list[WorkerEvidence]:
    epoch = e.state.fleet.mesh
    found = [e.of(m.worker_id) for m in epoch.members] if epoch is not None else []
    return [w for w in found if w is not None]


def _others(members: list[WorkerEvidence], worker: WorkerEvidence) -> list[WorkerEvidence]:
    return [w for w in members if w is not worker]
