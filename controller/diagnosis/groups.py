"""Diagnosis of a step that lacks groups: which rollout worker, reward, scorer or environment holds
them up, and which worker cannot load its weights."""

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
from controller.diagnosis.workers import quietest, silent_worker
from controller.ledger.enums import Lifecycle, Role
from paceline.observe.vocabulary import Severity
from paceline.process.waits import Wait, WaitKind
from paceline.worker_pools import SCORER, pool_of, worker_name

_USER_CODE = {WaitKind.REWARD: CulpritKind.REWARD, WaitKind.ENVIRONMENT: CulpritKind.ENVIRONMENT}
_HOLDING = (*_USER_CODE, WaitKind.SCORER, WaitKind.ENGINE, WaitKind.VERDICT)
"""Waits in which a worker holds tasks."""
STILL_S = 5.0


def groups(e: Evidence) -> Diagnosis | None:
    """No step is open: trainers wait for groups."""
    state = e.state
    if state.steps.open is not None or state.run_spec is None:
        return None
    ready, batch = state.ready_for_next_step, state.run.groups_per_step
    subject = f"step {state.versions.step + 1} ({ready} of {batch} groups ready)"
    workers = [w for w in e.workers if w.role is Role.ROLLOUT and not w.spare]
    if (worker := quietest(e, workers)) is not None:
        then = f"and its {worker.held} tasks go to others" if worker.held else ""
        return silent_worker(e, worker, subject, then=then)
    if workers and not state.run_spec.recorded and all(w.loaded_version < 0 for w in workers):
        return _no_weights(e, subject, workers)
    found = [(w, wait) for w in workers for wait in w.waits if wait.kind in _HOLDING]
    if not found:
        return None
    counts: dict[WaitKind, int] = {}
    for _, wait in found:
        counts[wait.kind] = counts.get(wait.kind, 0) + wait.count
    # The kind of wait that most tasks are in; the oldest of these.
    most = max(counts, key=lambda kind: counts[kind])
    worker, wait = max((f for f in found if f[1].kind is most), key=lambda f: f[1].age_s)
    if most is WaitKind.SCORER:
        return _scorer(e, subject, wait)
    return (_user_code if most in _USER_CODE else _worker)(e, subject, worker, wait)


def _no_weights(e: Evidence, subject: str, workers: list[WorkerEvidence]) -> Diagnosis:
    """No engine has weights: the one that waits longest, or the worker that sends them to it."""
    first = max(workers, key=lambda w: w.waits[0].age_s if w.waits else 0.0)
    link = e.state.fleet.links.get(first.worker_id)
    source = e.of(link.publisher) if link is not None else None
    if source is not None and e.silent(source):
        return silent_worker(e, source, subject, then="and another worker sends the weights")
    wait, sender = (
        first.waits_for(WaitKind.WEIGHTS),
        source.worker_id if source else "a policy replica",
    )
    age_s = wait.age_s if wait is not None else 0.0
    because = wait.what if wait is not None else f"which has no weights yet from {sender}"
    following = "it generates as soon as its engine has loaded them"
    asked = [w for w in (source, first) if w is not None]
    both = ", ".join(e.command(f"stacks {w.worker_id}") for w in asked)
    remedy = f"See what they do: {both}"
    late = age_s > e.late_s
    return finding(subject, first.culprit, because, age_s, following, remedy, late=late)


def _user_code(e: Evidence, subject: str, worker: WorkerEvidence, wait: Wait) -> Diagnosis:
    others = f" and {wait.count - 1} more groups" if wait.count > 1 else ""
    setting, hint = "rollout.environment_timeout_s", "{} limits it"
    if wait.kind is WaitKind.REWARD:
        setting, hint = "reward.timeout_s", "more processes (reward.processes) or a shorter {} help"
    following = ""
    if wait.limit_s:
        # The wait includes the queue before the call.
        left = f"in {seconds(wait.left_s)}" if wait.left_s else "after its call's time"
        following = f"the attempt fails {left} ({setting} = {wait.limit_s:g})"
    return finding(
        subject,
        Culprit(_USER_CODE[wait.kind], wait.of),
        f"called by {worker.culprit.words} for one group{others}",
        wait.age_s,
        following,
        f"See its stacks: {e.command(f'stacks {worker.worker_id}')}; {hint.format(setting)}",
        late=wait.age_s > e.late_s,
    )


def _worker(e: Evidence, subject: str, worker: WorkerEvidence, wait: Wait) -> Diagnosis:
    hung = wait.kind is WaitKind.ENGINE and worker.still_s > STILL_S
    # Long generations are usual: only an engine that makes no token is late.
    late = hung or (wait.kind is WaitKind.VERDICT and wait.age_s > e.late_s)
    because, age_s, following = wait.what, wait.age_s, ""
    if hung:
        age_s = worker.still_s
        because = f"whose engine has made no token for {seconds(age_s)}"
        if worker.wedged_in_s is not None:
            following = f"it is declared dead in {seconds(worker.wedged_in_s)}"
    remedy = f"See what it does: {e.command(f'stacks {worker.worker_id}')}"
    return finding(subject, worker.culprit, because, age_s, following, remedy, late=late)


def _scorer(e: Evidence, subject: str, wait: Wait) -> Diagnosis:
    """No worker of the scorer ``wait.of`` is alive, or those that are alive have not answered."""
    pool = pool_of(SCORER, wait.of)
    known = e.state.fleet.workers
    workers = [w for w in e.workers if w.worker_id in known and known[w.worker_id].pool == pool]
    first, late = worker_name(pool, 0), wait.age_s > e.late_s
    because = wait.what.removeprefix(f"waiting for scorer {wait.of}").strip(": ")
    alive = len(e.state.fleet.living_in(pool))
    more = e.command(f"scale {pool}={alive + 1}")
    remedy = f"See what it does: {e.command(f'stacks {first}')}, or add workers: {more}"
    severity = Severity.WARNING
    if not alive:
        because, severity = "none is alive", Severity.ERROR
        remedy = f"See why: {e.command(f'logs {first}')}"
        starting = [p for p in e.sessionless if p.worker_id.startswith(first[:-1]) and p.waits]
        if starting:
            because += f", and {starting[0].worker_id} is {starting[0].waits[0].what}"
        late = late or not starting
    elif silent := [w for w in workers if e.silent(w)]:
        because = f"{silent[0].culprit.words} does not report"
    elif all(w.lifecycle is Lifecycle.STARTING for w in workers):
        because = "which starts"
    culprit = Culprit(CulpritKind.SCORER, f"scorer {wait.of}")
    following, age_s = f"{wait.count} groups wait; none of their attempts fails", wait.age_s
    return finding(
        subject, culprit, because, age_s, following, remedy, late=late, severity=severity
    )


def loads(e: Evidence) -> Diagnosis | None:
    """The rollout worker with the most failed loads of weights since its last success."""
    workers = e.state.fleet.living(Role.ROLLOUT)
    failing = [w for w in workers if w.load_trouble and e.of(w.worker_id) is not None]
    if not failing:
        return None
    worst = max(failing, key=lambda worker: worker.load_failures)
    evidence = e.of(worst.worker_id)
    assert evidence is not None
    remedy = f"See its log: {e.command(f'logs {worst.worker_id}')}"
    if "out of memory" in worst.load_trouble:
        remedy = (
            "Give its host or GPU more memory, or let its engine take less of it: "
            "paceline plan memory shows what each part needs"
        )
    times = "once" if worst.load_failures == 1 else f"{worst.load_failures} times"
    also = f", like {len(failing) - 1} more" if len(failing) > 1 else ""
    because = f"which got weights and failed {times} to load them{also} ({worst.load_trouble})"
    following = "it gets them again over another link, and ends after 3 failures in a row"
    severity = Severity.ERROR if len(failing) == len(workers) else Severity.WARNING
    return Diagnosis("the run", evidence.culprit, because, 0.0, following, remedy, severity)
