"""Diagnosis of a run from evidence. Pure: of the worst findings the first rule's is told.

    state of the run ─► stores ─► leader ─► workers that are missing
                     ─► ranks ─► mesh ─► open step ─► groups ─► lost workers ─► learning ─► disk

The order is that of cause and effect: without Redis nothing is decided, without a leader nobody is
seen, without a mesh no step opens, without groups there is none to open. Who has paused or stopped
the run waits for the open step at most: workers at rest are not to blame.
"""

from collections.abc import Callable
from functools import partial

from controller.diagnosis import steps, stores, workers
from controller.diagnosis.evidence import Culprit, CulpritKind, Diagnosis, Evidence, seconds
from controller.ledger.enums import Phase, Role
from controller.ledger.views import at_its_end, beside_steps
from paceline.observe.vocabulary import Severity

WORKING = frozenset(CulpritKind) - {CulpritKind.NONE, CulpritKind.STARTING_WORKER, CulpritKind.HUB}
"""Culprits that are told of only if they are late."""
Rule = Callable[[Evidence], Diagnosis | None]


def diagnose(evidence: Evidence) -> Diagnosis:
    rules, at_rest = RULES, _resting(evidence)
    if at_rest is not None:
        over = evidence.state.ended or evidence.state.phase is Phase.SUSPENDED
        rules = () if over else AT_REST
        if evidence.state.steps.open is not None:
            rules += STEP
    found = [diagnosis for rule in rules if (diagnosis := rule(evidence)) is not None]
    # A member that computes and a task that is generated are a run at work.
    found = [d for d in found if d.severity is not Severity.INFO or d.culprit.kind not in WORKING]
    for severity in (Severity.ERROR, Severity.WARNING):
        for diagnosis in found:
            if diagnosis.severity is severity:
                return diagnosis
    return at_rest or (found[0] if found else _at_work(evidence))


def _resting(e: Evidence) -> Diagnosis | None:
    """The run has ended, or makes no more steps because somebody wants it so."""
    state, opened = e.state, e.state.steps.open
    finishes = f"step {opened.step} is finished first" if opened else ""
    if state.ended:
        because = f"has {state.phase} after step {state.versions.step}"
        because += f": {state.reason}" if state.reason else ""
        remedy, severity = f"Look at it: {e.command('samples')}", Severity.INFO
        if state.phase is Phase.FAILED:
            remedy, severity = f"See its events: {e.command('events')}", Severity.ERROR
        return Diagnosis("the run", because=because, remedy=remedy, severity=severity)
    told = {
        Phase.STOPPING: ("is stopping", finishes or "a last checkpoint is written"),
        Phase.SUSPENDING: ("stops for now", finishes or "a checkpoint is written"),
        Phase.SUSPENDED: ("has stopped for now", "paceline up with its config continues it"),
    }.get(state.phase)
    if told is None and not state.paused:
        return None
    if told is not None or opened:
        because, following = told or ("is pausing", finishes)
        return Diagnosis("the run", because=because, next=following)
    user, following = Culprit(CulpritKind.USER, "its user"), "nothing is leased until it is resumed"
    remedy, since_s = e.command("resume"), e.since_commit_s
    return Diagnosis("the run", user, "who has paused it", since_s, following, remedy)


def _at_work(e: Evidence) -> Diagnosis:
    opened = e.state.steps.open
    if at_its_end(e.state):
        still = beside_steps(e.state) or "its workers leave"
        return Diagnosis("the run", because="has committed its last step", next=still)
    subject = f"step {opened.step if opened else e.state.versions.step + 1}"
    because, severity = "is at work and waits for nobody", Severity.INFO
    if e.since_commit_s > e.late_s and e.usual_step_s > 0:
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
AT_REST: tuple[Rule, ...] = (stores.redis, stores.leadership, stores.checkpoint)
"""Rules of a run that makes no more steps than the open one."""
RULES: tuple[Rule, ...] = (
    stores.redis,
    stores.payloads,
    stores.dataset,
    stores.leadership,
    workers.holders,
    partial(workers.absent, Role.POLICY),
    *STEP,
    partial(workers.absent, Role.ROLLOUT),
    steps.loads,
    steps.groups,
    workers.anyone_silent,
    workers.lost,
    learning,
    stores.checkpoint,
)
