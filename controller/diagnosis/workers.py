"""Diagnosis of workers: one that does not report or takes long, and a role without a worker at
work."""

from collections.abc import Iterable
from dataclasses import replace

from controller.diagnosis.evidence import (
    Culprit,
    CulpritKind,
    Diagnosis,
    Evidence,
    WorkerEvidence,
    finding,
    seconds,
)
from controller.ledger.enums import Lifecycle, Role
from controller.ledger.state.fleet import Worker
from paceline.errors import plural
from paceline.observe.vocabulary import ATTRIBUTED, NO_FAULT, FaultCause, Severity
from paceline.process.waits import Wait, WaitKind
from paceline.worker_pools import role_of, scorer_of

_SHARED = (WaitKind.COLLECTIVE, WaitKind.VOTES, WaitKind.PEERS, WaitKind.STATE)
"""Waits in which a member may be because of another member."""
DEATHS = frozenset(FaultCause) - NO_FAULT
START_S = 20.0  # importing torch and transformers takes seconds
LOAD_S = 180.0


def silent_worker(
    e: Evidence,
    worker: WorkerEvidence,
    subject: str,
    *,
    peers: Iterable[WorkerEvidence] = (),
    then: str = "",
) -> Diagnosis:
    """``peers``: workers that wait for it, whose reports may say where it stands. ``then``: what
    its death leads to."""
    left_s = worker.dead_in_s
    if worker.wedged_in_s is not None:
        left_s = min(left_s, worker.wedged_in_s)
    following = f"it is declared dead in {seconds(left_s)}" + (f", {then}" if then else "")
    look = [e.command(f"{verb} {worker.worker_id}") for verb in ("stacks", "logs")]
    host, kernel = worker.host or "its host", worker.kernel
    remedy = f"Look at what it does: {', '.join(look)}; check the network to {host}"
    if kernel is not None and kernel.stopped:
        remedy = f"Continue it: kill -CONT {worker.pid} on {worker.host}"
    place = f'at "{worker.activity}"' if worker.activity else ""
    # It came to the collective after its last report, or its peers would not be waiting in it.
    met = (peer.waits_for(WaitKind.COLLECTIVE) for peer in peers)
    if wait := worker.waits[0] if worker.waits else next(filter(None, met), None):
        place = at(wait.what)
    if kernel is not None and (kernel.stopped or kernel.uninterruptible):
        because = f"{'stopped' if kernel.stopped else kernel.words} {place}"
    else:
        lost = "its session broke" if worker.suspect else "silent"
        because = f"{lost}, last report {seconds(worker.silent_s)} ago, {place}"
    waited_s = [wait.age_s for peer in peers for wait in peer.waits if wait.kind in _SHARED]
    return Diagnosis(
        subject,
        worker.culprit(),
        because.rstrip(", "),
        max([*waited_s, worker.silent_s]),
        following,
        remedy,
        Severity.ERROR,
    )


def at(what: str) -> str:
    return what if what.startswith("inside") else f"while {what}"


def slow_worker(
    e: Evidence, worker: WorkerEvidence, subject: str, wait: Wait | None, waited_s: float
) -> Diagnosis:
    """A worker that reports and that others wait for."""
    doing = wait.what if wait is not None else f'at "{worker.activity or worker.lifecycle}"'
    still = f", without progress for {seconds(worker.still_s)}" if worker.still_s >= 1.0 else ""
    following = ""
    if wait is not None and wait.left_s is not None:
        following = f"it gives up in {seconds(wait.left_s)}"
    elif worker.wedged_in_s is not None:
        following = f"if it makes no progress it is declared dead in {seconds(worker.wedged_in_s)}"
    remedy, late = e.look_at(worker.worker_id), waited_s > e.late_s
    return finding(subject, worker.culprit(), doing + still, waited_s, following, remedy, late=late)


def anyone_silent(e: Evidence) -> Diagnosis | None:
    """A silent worker that nobody waits for yet."""
    worker = e.quietest(e.workers)
    return None if worker is None else silent_worker(e, worker, "the run")


def holders(e: Evidence) -> Diagnosis | None:
    """A worker that was asked for its seat and has not parked, or that loads a model in its first
    turn. The other side of the seat waits for it."""
    for seat in e.state.fleet.seats.by_name.values():
        worker = e.of(seat.holder[0]) if seat.holder is not None else None
        # A replica that is asked for its seat leaves after the open step: see there.
        if worker is None or (worker.role is Role.POLICY and e.state.steps.open is not None):
            continue
        if not seat.asked:
            if (wait := worker.waits_for(WaitKind.MODEL, WaitKind.HUB)) is not None:
                return _loads(e, worker, wait)
            continue
        asked_s = max(0.0, e.now_t - seat.since)
        if asked_s <= max(START_S, e.late_s):
            continue
        if e.silent(worker) or worker.suspect:
            return silent_worker(e, worker, f"seat {seat.name}")
        why = f"which was asked for it ({seat.why}) and has not parked"
        found = slow_worker(e, worker, f"seat {seat.name}", None, asked_s)
        return replace(found, because=f"{why}, {found.because}")
    return None


def absent(role: Role, e: Evidence) -> Diagnosis | None:
    """No worker of the role is at work."""
    registered = [w for w in e.workers if w.role is role]
    if any(w.lifecycle is not Lifecycle.STARTING for w in registered):
        return None
    words = f"a {role.words}"
    if not e.desired.get(role, 1):
        user, remedy = Culprit(CulpritKind.USER, words), e.command(f"scale {role}=1")
        because, since_s = f"because the desired number is 0 (fleet.{role})", e.since_commit_s
        return Diagnosis("the run", user, because, since_s, "", remedy, Severity.ERROR)
    if registered:
        process = registered[0].culprit(CulpritKind.STARTING_WORKER)
        return Diagnosis("the run", process, f'at "{registered[0].activity}"', e.since_commit_s)
    return _none_registered(e, role, words)


def _loads(e: Evidence, worker: WorkerEvidence, wait: Wait) -> Diagnosis:
    """The run waits for a worker that loads its model, or for the hub that has it."""
    culprit, because = worker.culprit(CulpritKind.STARTING_WORKER), wait.what
    advice, usual_s = "Check the disk or mount behind model.path", LOAD_S
    if wait.kind is WaitKind.HUB:  # it answers, or it does not
        culprit, because = Culprit(CulpritKind.HUB, wait.of), f"{worker.words} is {wait.what}"
        advice = "Check HF_ENDPOINT and the network to it, or set model.path to a local directory"
        usual_s = START_S
    name, remedy = worker.worker_id, f"{advice}. {e.look_at(worker.worker_id)}"
    following = f"{name} joins the run once that is done, or ends with an error that names it"
    late = wait.age_s > usual_s
    severity = Severity.ERROR if wait.age_s > LOAD_S else Severity.WARNING
    return finding(
        "the run", culprit, because, wait.age_s, following, remedy, late=late, severity=severity
    )


def _none_registered(e: Evidence, role: Role, words: str) -> Diagnosis:
    dead = [w for w in e.state.fleet.workers.values() if w.role is role and not w.alive]
    culprit, name = Culprit(CulpritKind.STARTING_WORKER, words), f"{role}-0"
    because, following = "none has registered", "the run begins with the first"
    if dead:
        last, name = dead[-1], dead[-1].worker_id
        culprit = Culprit(CulpritKind.WORKER, name, last.host, last.pid)
        because = f"which is {last.lifecycle}, and no other {role.words} has registered"
        following = "its launcher starts it again"
    if e.provider_trouble:
        following = f"the provider reports: {e.provider_trouble}"
    logs, stacks = e.command(f"logs {name}"), e.command(f"stacks {name}")
    remedy = f"{logs} shows why it is not up, {stacks} where it stands if it starts; "
    remedy += f"paceline {role} starts one by hand"
    since_s = e.since_commit_s
    severity = Severity.ERROR if since_s > LOAD_S else Severity.WARNING
    late = bool(dead) or since_s > START_S
    return finding(
        "the run", culprit, because, since_s, following, remedy, late=late, severity=severity
    )


def lost(e: Evidence) -> Diagnosis | None:
    """The run goes on with fewer workers than it should have, because some died."""
    dead: list[Worker] = []
    at_work = []
    for pool, wanted in e.desired.items():
        alive = len(e.state.fleet.living_in(pool))
        gone = [w for w in e.state.fleet.workers.values() if w.pool == pool and w.death in DEATHS]
        # "2 policy replicas", "1 scorer helpful".
        words = f"{plural(wanted, Role(role_of(pool)).words)} {scorer_of(pool)}".rstrip()
        at_work.append(f"{min(alive, wanted)} of {words}")
        dead += gone[: max(0, wanted - alive)]
    if not dead:
        return None
    first, *others = dead
    because = str(first.death).replace("_", " ") if first.death in ATTRIBUTED else "cause unknown"
    if others:
        because += f", and {', '.join(w.worker_id for w in others[:5])}"
    again = f"a launcher starts {'them' if others else 'it'} again"
    following = f"{' and '.join(at_work)} go on, and {again}"
    if e.provider_trouble:
        following += f"; the provider reports: {e.provider_trouble}"
    culprit = Culprit(CulpritKind.WORKER, first.worker_id, first.host, first.pid)
    remedy, severity = f"See why: {e.command(f'logs {first.worker_id}')}", Severity.WARNING
    return Diagnosis("the run", culprit, because, 0.0, following, remedy, severity, lost=True)
