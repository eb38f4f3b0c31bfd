"""Diagnosis of a run from evidence. Pure: of the worst findings the first rule's is told.

    the run itself ─► stores ─► leader ─► workers that are missing ─► ranks ─► mesh ─► open step ─► groups ─► disk

The order is that of cause and effect: without Redis nothing is decided, without a leader nobody is
seen, without a mesh no step opens, without groups there is none to open.
"""

from __future__ import annotations

from collections.abc import Callable

from controller.diagnosis import absent_workers, groups, loads, steps, stores
from controller.diagnosis.diagnosis import Culprit, CulpritKind, Diagnosis, Urgency
from controller.diagnosis.evidence import Evidence
from controller.diagnosis.silent_workers import culprit_of, quietest, silent_worker
from controller.ledger.enums import Phase
from paceline.process.waits import WaitKind

CHECKPOINT_S = 60.0
"""Writing a checkpoint takes longer only on a disk that is slow, or gone."""


def diagnose(evidence: Evidence) -> Diagnosis:
    """The worst finding; of equally bad ones the first rule's."""
    found = [diagnosis for rule in RULES if (diagnosis := rule(evidence)) is not None]
    found.append(_at_work(evidence))
    for severity in (Urgency.STUCK, Urgency.SLOW):
        if worst := [diagnosis for diagnosis in found if diagnosis.severity is severity]:
            return worst[0]
    return found[0]


def over(e: Evidence) -> Diagnosis | None:
    if not e.state.ended:
        return None
    because = f"has {e.state.phase}" + (f": {e.state.reason}" if e.state.reason else "")
    return Diagnosis("the run", because=because)


def paused(e: Evidence) -> Diagnosis | None:
    if not e.state.paused or e.state.steps.open is not None:
        return None
    return Diagnosis(
        "the run",
        Culprit(CulpritKind.USER, "its user"),
        because="who has paused it",
        since_s=e.since_commit_s,
        next="nothing is leased until it is resumed",
        remedy="paceline resume",
    )


def checkpoint(e: Evidence) -> Diagnosis | None:
    """A checkpoint that is being written; what a stopping run waits for last."""
    stopping = e.state.phase in (Phase.STOPPING, Phase.SUSPENDING)
    least_s = 0.0 if stopping else CHECKPOINT_S
    for worker in e.workers:
        wait = worker.waits_for(WaitKind.CHECKPOINT)
        if wait is not None and wait.age_s >= least_s and wait.what.startswith("writing"):
            return Diagnosis(
                "the end of the run" if stopping else "the next checkpoint",
                Culprit(CulpritKind.CHECKPOINT, wait.of),
                because=f"{culprit_of(worker).words} is {wait.what}",
                since_s=wait.age_s,
                next="the run ends once it is on disk"
                if stopping
                else "training goes on meanwhile",
                remedy=f"Check the disk behind it: df {wait.of}"
                if wait.age_s > CHECKPOINT_S
                else "",
                severity=Urgency.SLOW if wait.age_s > CHECKPOINT_S else Urgency.OK,
            )
    return None


def anyone_silent(e: Evidence) -> Diagnosis | None:
    """Nobody waits for it yet."""
    worker = quietest(e, list(e.workers))
    if worker is None:
        return None
    return silent_worker(e, worker, "the run")


def _at_work(e: Evidence) -> Diagnosis:
    opened = e.state.steps.open
    subject = f"step {opened.step}" if opened else f"step {e.state.versions.step + 1}"
    late = e.since_commit_s > e.late_s and e.usual_step_s > 0
    because = "is at work and waits for nobody" if not late else "takes longer than usual"
    return Diagnosis(
        subject,
        because=because,
        since_s=e.since_commit_s,
        next=e.pace[:1].lower() + e.pace[1:].rstrip(".") if e.pace else "",
        severity=Urgency.SLOW if late else Urgency.OK,
    )


RULES: tuple[Callable[[Evidence], Diagnosis | None], ...] = (
    over,
    stores.redis,
    stores.payloads,
    stores.dataset,
    stores.leadership,
    paused,
    absent_workers.absent_policy,
    steps.stuck_rank,
    steps.mesh,
    steps.step,
    absent_workers.absent_rollout,
    loads.loads,
    groups.groups,
    anyone_silent,
    checkpoint,
)
