"""Diagnosis of a run from evidence. Pure: of the worst findings the first rule's is told.

    the run itself ─► stores ─► leader ─► workers that are missing
                   ─► ranks ─► mesh ─► open step ─► groups ─► disk

The order is that of cause and effect: without Redis nothing is decided, without a leader nobody is
seen, without a mesh no step opens, without groups there is none to open.
"""

from __future__ import annotations

from collections.abc import Callable

from controller.diagnosis import groups, steps, stores, workers
from controller.diagnosis.evidence import Culprit, CulpritKind, Diagnosis, Evidence, finding
from controller.diagnosis.workers import quietest, silent_worker
from controller.ledger.enums import Phase
from paceline.observe.vocabulary import Severity
from paceline.process.waits import WaitKind

CHECKPOINT_S = 60.0  # writing a checkpoint takes longer only on a disk that is slow, or gone


def diagnose(evidence: Evidence) -> Diagnosis:
    found = [diagnosis for rule in RULES if (diagnosis := rule(evidence)) is not None]
    found.append(_at_work(evidence))
    order = (Severity.ERROR, Severity.WARNING)
    return next((d for severity in order for d in found if d.severity is severity), found[0])


def over(e: Evidence) -> Diagnosis | None:
    because = f"has {e.state.phase}" + (f": {e.state.reason}" if e.state.reason else "")
    return Diagnosis("the run", because=because) if e.state.ended else None


def paused(e: Evidence) -> Diagnosis | None:
    if not e.state.paused or e.state.steps.open is not None:
        return None
    user, following = Culprit(CulpritKind.USER, "its user"), "nothing is leased until it is resumed"
    because, remedy = "who has paused it", "paceline resume"
    return Diagnosis("the run", user, because, e.since_commit_s, following, remedy)


def checkpoint(e: Evidence) -> Diagnosis | None:
    """A checkpoint that is being written; what a stopping run waits for last."""
    stopping = e.state.phase in (Phase.STOPPING, Phase.SUSPENDING)
    for worker in e.workers:
        wait = worker.waits_for(WaitKind.CHECKPOINT)
        if wait is None or not wait.what.startswith("writing"):
            continue
        if stopping or wait.age_s >= CHECKPOINT_S:
            return finding(
                "the end of the run" if stopping else "the next checkpoint",
                Culprit(CulpritKind.CHECKPOINT, wait.of),
                f"{worker.culprit.words} is {wait.what}",
                wait.age_s,
                "the run ends once it is on disk" if stopping else "training goes on meanwhile",
                f"Check the disk behind it: df {wait.of}",
                late=wait.age_s > CHECKPOINT_S,
            )
    return None


def anyone_silent(e: Evidence) -> Diagnosis | None:
    """A silent worker that nobody waits for yet."""
    worker = quietest(e, e.workers)
    return None if worker is None else silent_worker(e, worker, "the run")


def _at_work(e: Evidence) -> Diagnosis:
    opened = e.state.steps.open
    subject = f"step {opened.step}" if opened else f"step {e.state.versions.step + 1}"
    late = e.since_commit_s > e.late_s and e.usual_step_s > 0
    because = "takes longer than usual" if late else "is at work and waits for nobody"
    pace = e.pace[:1].lower() + e.pace[1:].rstrip(".")
    return finding(subject, Culprit(), because, e.since_commit_s, pace, late=late)


RULES: tuple[Callable[[Evidence], Diagnosis | None], ...] = (
    over,
    stores.redis,
    stores.payloads,
    stores.dataset,
    stores.leadership,
    paused,
    workers.absent_policy,
    steps.stuck_rank,
    steps.mesh,
    steps.step,
    workers.absent_rollout,
    groups.loads,
    groups.groups,
    anyone_silent,
    checkpoint,
)
