"""Diagnosis of groups that wait for a scorer: none is alive, or those that are alive have not
answered."""

from __future__ import annotations

from controller.diagnosis.diagnosis import Culprit, CulpritKind, Diagnosis, Urgency
from controller.diagnosis.evidence import Evidence, WorkerEvidence
from controller.ledger.enums import Lifecycle
from paceline.process.waits import Wait
from paceline.worker_pools import SCORER, pool_of, worker_name


def scorer(e: Evidence, subject: str, worker: WorkerEvidence, wait: Wait) -> Diagnosis:
    """``wait``: of ``worker``, a rollout worker, for the scorer ``wait.of``."""
    pool = pool_of(SCORER, wait.of)
    late = wait.age_s > e.late_s
    urgency = Urgency.SLOW if late else Urgency.OK
    because = wait.what.removeprefix(f"waiting for scorer {wait.of}").strip(": ")
    following = f"{wait.count} groups wait; none of their attempts fails"
    first = worker_name(pool, 0)
    remedy = f"See what it does: paceline stacks {first}, or add workers: paceline scale {pool}=N"
    if not e.state.fleet.living_in(pool):
        because, urgency = "none is alive", Urgency.STUCK
        remedy = f"See why: paceline logs --run-dir DIR {first}"
        starting = [p for p in e.sessionless if p.worker_id.startswith(first[:-1]) and p.waits]
        if starting:
            because += f", and {starting[0].worker_id} is {starting[0].waits[0].what}"
            urgency = Urgency.STUCK if late else Urgency.OK
    elif silent := [w for w in e.workers if _in(e, w, pool) and e.silent(w)]:
        because = (
            f"{silent[0].worker_id} (host {silent[0].host}, pid {silent[0].pid}) does not report"
        )
    elif all(w.lifecycle is Lifecycle.STARTING for w in e.workers if _in(e, w, pool)):
        because = "which starts"
    return Diagnosis(
        subject,
        Culprit(CulpritKind.SCORER, f"scorer {wait.of}"),
        because=because,
        since_s=wait.age_s,
        next=following,
        remedy=remedy if late or urgency is Urgency.STUCK else "",
        severity=urgency,
    )


def _in(e: Evidence, worker: WorkerEvidence, pool: str) -> bool:
    known = e.state.fleet.workers.get(worker.worker_id)
    return known is not None and known.pool == pool
