"""Diagnoses of the mesh and of the open step: which member the others wait for."""

from __future__ import annotations

from controller.diagnosis.diagnosis import Culprit, CulpritKind, Diagnosis, Urgency, seconds
from controller.diagnosis.evidence import Evidence, WorkerEvidence
from controller.diagnosis.silent_workers import at, quietest, silent_worker, slow_worker
from controller.diagnosis.stores import of_payloads
from controller.ledger.enums import Role
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
        left_s = worker.wedged_in_s
        return Diagnosis(
            f"step {opened.step}" if opened is not None else "the run",
            Culprit(CulpritKind.WORKER, f"{rank} of {worker.worker_id}", worker.host, pid),
            because=how,
            since_s=wait.age_s,
            next=f"{worker.worker_id} is declared dead in {seconds(left_s)} if it makes no progress"
            if left_s is not None
            else f"{worker.worker_id} waits for it in its next collective",
            remedy=f"Continue it: kill -CONT {pid} on {worker.host}"
            if how == "stopped"
            else f"Check the device or the mount that it waits for, on {worker.host}",
            severity=Urgency.STUCK,
        )
    return None


def mesh(e: Evidence) -> Diagnosis | None:
    """No epoch, a broken one, or one that its members have not all formed."""
    epoch = e.state.fleet.mesh
    replicas = [w for w in e.workers if w.role is Role.POLICY]
    if epoch is None or epoch.broken:
        number = 1 if epoch is None else epoch.epoch + 1
        subject = f"mesh epoch {number}"
        if (worker := quietest(e, replicas)) is not None:
            return silent_worker(e, worker, subject, then="and the others form the epoch")
        unheard = [w for w in replicas if not w.heard]
        if unheard:
            return slow_worker(e, unheard[0], subject, None, unheard[0].silent_s)
        because = "is being formed: the members have reported, and generation continues"
        slow = e.since_commit_s > e.late_s
        return Diagnosis(subject, because=because, severity=Urgency.SLOW if slow else Urgency.OK)
    members = _members(e)
    late = [w for w in members if w.mesh_epoch != epoch.epoch]
    if not late:
        return None
    subject = f"mesh epoch {epoch.epoch}"
    if (worker := quietest(e, members)) is not None:
        return silent_worker(e, worker, subject, peers=_others(members, worker), then=REDONE)
    # A member that still does something else keeps those waiting that have come to meet it.
    busy = [w for w in late if w.waits_for(WaitKind.PEERS, WaitKind.STATE) is None]
    met = [wait for w in late if (wait := w.waits_for(WaitKind.PEERS)) is not None]
    if busy:
        wait = busy[0].waits[0] if busy[0].waits else None
        waited_s = max([w.age_s for w in met], default=wait.age_s if wait else 0.0)
        return slow_worker(e, busy[0], subject, wait, waited_s)
    moving = next((w for w in late if w.waits_for(WaitKind.STATE)), None)
    if moving is not None:
        wait = moving.waits_for(WaitKind.STATE)
        return slow_worker(e, moving, subject, wait, wait.age_s if wait else 0.0)
    return _network(e, subject, late, WaitKind.PEERS)


def step(e: Evidence) -> Diagnosis | None:
    """The open step waits for votes."""
    opened = e.state.steps.open
    if opened is None:
        return None
    subject = f"step {opened.step}"
    members = _members(e)
    late = [w for w in members if w.worker_id not in opened.votes]
    if not late:
        return None
    if (worker := quietest(e, late)) is not None:
        then = REDONE if len(members) > 1 else "and a checkpoint is restored by its replacement"
        return silent_worker(e, worker, subject, peers=_others(members, worker), then=then)
    outside = [w for w in late if w.waits_for(WaitKind.COLLECTIVE) is None]
    inside = [w for w in late if w not in outside]
    if not outside and len(members) > 1:
        return _network(e, subject, late, WaitKind.COLLECTIVE)
    worker = max(outside or inside, key=lambda w: w.still_s)
    waited = [w.waits_for(WaitKind.COLLECTIVE, WaitKind.VOTES) for w in members if w is not worker]
    wait = worker.waits[0] if worker.waits else None
    if wait is not None and wait.kind is WaitKind.PAYLOADS:
        return of_payloads(e, subject, worker, wait)
    waited_s = max([w.age_s for w in waited if w is not None], default=worker.still_s)
    return slow_worker(e, worker, subject, wait, waited_s)


def _network(
    e: Evidence, subject: str, members: list[WorkerEvidence], kind: WaitKind
) -> Diagnosis | None:
    """All are there, and each waits for the others: what is between them."""
    waits = [wait for w in members if (wait := w.waits_for(kind)) is not None]
    if not waits:
        return None
    oldest = max(waits, key=lambda wait: wait.age_s)
    late = oldest.age_s > max(FORM_S, e.late_s)
    names = ", ".join(w.worker_id for w in members[:5])
    wedged = [w.wedged_in_s for w in members if w.wedged_in_s is not None]
    if oldest.left_s is not None:
        following = f"the epoch fails in {seconds(oldest.left_s)}, and a new one is formed"
    elif wedged:
        following = f"if nothing moves, one is declared dead in {seconds(min(wedged))}"
    else:
        following = ""
    return Diagnosis(
        subject,
        Culprit(CulpritKind.NETWORK, f"the network between {names}"),
        because=f"which all report {at(oldest.what)}",
        since_s=oldest.age_s,
        next=following,
        remedy="Check that their hosts reach each other on all ports (tensor_host)" if late else "",
        severity=Urgency.SLOW if late else Urgency.OK,
    )


def _members(e: Evidence) -> list[WorkerEvidence]:
    epoch = e.state.fleet.mesh
    found = [e.of(m.worker_id) for m in epoch.members] if epoch is not None else []
    return [w for w in found if w is not None]


def _others(members: list[WorkerEvidence], worker: WorkerEvidence) -> list[WorkerEvidence]:
    return [w for w in members if w is not worker]
