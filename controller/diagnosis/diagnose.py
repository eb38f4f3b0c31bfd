"""Diagnosis of a run from evidence. Pure: of the worst findings the first rule's is told.

    state of the run ─► stores ─► leader ─► workers that are missing
                     ─► ranks ─► mesh ─► open step ─► groups ─► lost workers ─► learning ─► disk

The order is that of cause and effect: without Redis nothing is decided, without a leader nobody is
seen, without a mesh no step opens, without groups there is none to open. Who has paused or stopped
the run waits for the open step at most: workers at rest are not to blame.
"""

from __future__ import annotations

from collections.abc import Callable

from controller.diagnosis import groups, steps, stores, workers
from controller.diagnosis.evidence import (
    Culprit,
    CulpritKind,
    Diagnosis,
    Evidence,
    finding,
    seconds,
)
from controller.diagnosis.workers import quietest, silent_worker
from controller.ledger.enums import Phase
from paceline.observe.vocabulary import Severity
from paceline.process.waits import WaitKind

CHECKPOINT_S = 60.0  # writing a checkpoint takes longer only on a disk that is slow, or gone

WORKING = frozenset(CulpritKind) - {CulpritKind.NONE, CulpritKind.STARTING_WORKER, CulpritKind.HUB}
"""Culprits that are told of only if they are late."""
Rule = Callable[[Evidence], Diagnosis | None]


def diagnose(evidence: Evidence) -> Diagnosis:
    otherwise, rules = _at_work(evidence), RULES
    if (at_rest := resting(evidence)) is not None:
        otherwise, rules = at_rest, () if _is_over(evidence) else AT_REST
    if at_rest is not None and evidence.state.steps.open is not None:
        rules += STEP
    found = [diagnosis for rule in rules if (diagnosis := rule(evidence)) is not None]
    # A member that computes and a task that is generated are a run at work.
    found = [d for d in found if d.severity is not Severity.INFO or d.culprit.kind not in WORKING]
    order = (Severity.ERROR, Severity.WARNING)
    worst = next((d for severity in order for d in found if d.severity is severity), None)
    if worst is not None:
        return worst
    return found[0] if found and at_rest is None else otherwise


def _is_over(e: Evidence) -> bool:
    return e.state.ended or e.state.phase is Phase.SUSPENDED


def resting(e: Evidence) -> Diagnosis | None:
    """The run has ended, or makes no more steps because somebody wants it so."""
    state, opened = e.state, e.state.steps.open
    finishes = f"step {opened.step} is finished first" if opened else ""
    user = Culprit(CulpritKind.USER, "its user")
    if state.ended:
        because = f"has {state.phase} after step {state.versions.step}"
        because += f": {state.reason}" if state.reason else ""
        remedy = f"Look at it: {e.command('samples')}"
        severity = Severity.INFO
        if state.phase is Phase.FAILED:
            remedy, severity = f"See its events: {e.command('events')}", Severity.ERROR
        return Diagnosis("the run", because=because, remedy=remedy, severity=severity)
    match state.phase:
        case Phase.STOPPING:
            following = finishes or "a last checkpoint is written"
            return Diagnosis("the run", because="is stopping", next=following)
        case Phase.SUSPENDING:
            following = finishes or "a checkpoint is written"
            return Diagnosis("the run", because="stops for now", next=following)
        case Phase.SUSPENDED:
            because, following = "has stopped for now", "paceline up with its config continues it"
            return Diagnosis("the run", because=because, next=following)
    if not state.paused:
        return None
    if opened:
        return Diagnosis("the run", because="is pausing", next=finishes)
    because, following = "who has paused it", "nothing is leased until it is resumed"
    return Diagnosis("the run", user, because, e.since_commit_s, following, e.command("resume"))


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
    because, severity = "is at work and waits for nobody", Severity.INFO
    if late:
        because = f"takes {seconds(e.since_commit_s)}, longer than usual"
        severity = Severity.WARNING
    pace = e.pace[:1].lower() + e.pace[1:].rstrip(".")
    return Diagnosis(subject, because=because, next=pace, severity=severity)


def learning(e: Evidence) -> Diagnosis | None:
    """Steps are committed, and teach the policy nothing."""
    if not e.unlearned:
        return None
    remedy = (
        f"Look at samples: {e.command('samples')}. Three usual causes: the reward is constant "
        "(reward.functions); completions are alike (rollout.temperature); the task is too hard or "
        "too easy for the model"
    )
    severity = Severity.WARNING
    return Diagnosis("the run", because=e.unlearned, remedy=remedy, severity=severity)


STEP: tuple[Rule, ...] = (steps.stuck_rank, steps.mesh, steps.step)
AT_REST: tuple[Rule, ...] = (stores.redis, stores.leadership, checkpoint)
"""Rules of a run that makes no more steps than the open one."""
RULES: tuple[Rule, ...] = (
    stores.redis,
    stores.payloads,
    stores.dataset,
    stores.leadership,
    workers.absent_policy,
    *STEP,
    workers.absent_rollout,
    groups.loads,
    groups.groups,
    anyone_silent,
    workers.lost,
    learning,
    checkpoint,
)
