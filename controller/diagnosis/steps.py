"""Diagnoses of the mesh, of the open step, and of a step that lacks groups: who or what the others
wait for."""

from collections import Counter

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
from controller.diagnosis.workers import at, silent_worker, slow_worker
from controller.ledger.enums import Lifecycle, Role
from controller.ledger.views import at_its_end
from paceline.errors import plural
from paceline.observe.vocabulary import Severity
from paceline.process.waits import Wait, WaitKind
from paceline.worker_pools import SCORER, pool_of, worker_name

FORM_S = 5.0
"""Forming an epoch takes less than a second; receiving the state of a large model longer."""
STILL_S = 5.0
REDONE = "and the others do the step without it"
_USER_CODE = {
    WaitKind.REWARD: (
        CulpritKind.REWARD,
        "reward.timeout_s",
        "more processes (reward.processes) or a shorter reward.timeout_s help",
    ),
    WaitKind.ENVIRONMENT: (
        CulpritKind.ENVIRONMENT,
        "rollout.environment_timeout_s",
        "rollout.environment_timeout_s limits it",
    ),
}
"""Culprit, setting and remedy of waits for code of the user."""
_HOLDING = (*_USER_CODE, WaitKind.SCORER, WaitKind.ENGINE, WaitKind.VERDICT)
"""Waits in which a worker holds tasks."""


def stuck_rank(e: Evidence) -> Diagnosis | None:
    """Rank 0 of a replica reports, and says that another rank does not run."""
    found = ((worker, wait) for worker in e.workers if (wait := worker.waits_for(WaitKind.RANK)))
    worker, wait = next(found, (None, None))
    if worker is None or wait is None:
        return None
    opened, name = e.state.steps.open, worker.worker_id
    rank, _, how = wait.what.partition(", ")
    pid = int(wait.of) if wait.of.isdecimal() else 0
    following = f"{name} waits for it in its next collective"
    if (left_s := worker.wedged_in_s) is not None:
        following = f"{name} is declared dead in {seconds(left_s)} if it makes no progress"
    remedy = f"Check the device or the mount that it waits for, on {worker.host}"
    if how == "stopped":
        remedy = f"Continue it: kill -CONT {pid} on {worker.host}"
    subject = f"step {opened.step}" if opened is not None else "the run"
    culprit = Culprit(CulpritKind.WORKER, f"{rank} of {name}", worker.host, pid)
    return Diagnosis(subject, culprit, how, wait.age_s, following, remedy, Severity.ERROR)


def mesh(e: Evidence) -> Diagnosis | None:
    """No epoch, a broken one, or one that its members have not all formed."""
    epoch = e.state.fleet.mesh
    if epoch is None or epoch.broken:
        replicas = [w for w in e.workers if w.role is Role.POLICY]
        if all(w.lifecycle is Lifecycle.STARTING for w in replicas):
            return None  # nobody could form it yet
        subject = f"mesh epoch {1 if epoch is None else epoch.epoch + 1}"
        if (worker := e.quietest(replicas)) is not None:
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
    if (worker := e.quietest(members)) is not None:
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
    if (worker := e.quietest(late)) is not None:
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
    culprit = Culprit(CulpritKind.NETWORK, f"the network between {names}")
    because, age_s = f"which all report {at(oldest.what)}", oldest.age_s
    remedy = "Check that their hosts reach each other on all ports (tensor_host)"
    late = age_s > max(FORM_S, e.late_s)
    return finding(subject, culprit, because, age_s, following, remedy, late=late)


def _members(e: Evidence) -> list[WorkerEvidence]:
    epoch = e.state.fleet.mesh
    found = [e.of(m.worker_id) for m in epoch.members] if epoch is not None else []
    return [w for w in found if w is not None]


def _others(members: list[WorkerEvidence], worker: WorkerEvidence) -> list[WorkerEvidence]:
    return [w for w in members if w is not worker]


def groups(e: Evidence) -> Diagnosis | None:
    """No step is open: trainers wait for groups."""
    state = e.state
    if state.steps.open is not None or state.run_spec is None:
        return None
    step, batch = state.next_step, state.run.groups_per_step
    ready = len(state.steps.replay.get(step, ())) + len(state.tasks.ready)
    subject = f"step {step} ({ready} of {plural(batch, 'group')} ready)"
    if at_its_end(state):
        subject = "the end of the run"
    workers = [w for w in e.workers if w.role is Role.ROLLOUT and not w.spare]
    if (worker := e.quietest(workers)) is not None:
        then = f"and its {plural(worker.held, 'task')} go to others" if worker.held else ""
        return silent_worker(e, worker, subject, then=then)
    if workers and not state.run_spec.recorded and all(w.loaded_version < 0 for w in workers):
        return _no_weights(e, subject, workers)
    found = [(w, wait) for w in workers for wait in w.waits if wait.kind in _HOLDING]
    if not found:
        return None
    counts: Counter[WaitKind] = Counter()
    for _, wait in found:
        counts[wait.kind] += wait.count
    # The kind of wait that most tasks are in; the oldest of these.
    ((most, _),) = counts.most_common(1)
    worker, wait = max((f for f in found if f[1].kind is most), key=lambda f: f[1].age_s)
    if most is WaitKind.SCORER:
        return _scorer(e, subject, wait)
    return (_user_code if most in _USER_CODE else _engine)(e, subject, worker, wait)


def _no_weights(e: Evidence, subject: str, workers: list[WorkerEvidence]) -> Diagnosis:
    """No engine has weights: the one that waits longest, or the worker that sends them to it."""
    first = max(workers, key=lambda w: w.waits[0].age_s if w.waits else 0.0)
    link = e.state.fleet.links.get(first.worker_id)
    source = e.of(link.publisher) if link is not None else None
    if source is not None and e.silent(source):
        return silent_worker(e, source, subject, then="and another worker sends the weights")
    sender = source.worker_id if source else "a policy replica"
    because, age_s = f"which has no weights yet from {sender}", 0.0
    if (wait := first.waits_for(WaitKind.WEIGHTS)) is not None:
        because, age_s = wait.what, wait.age_s
    following = "it generates as soon as its engine has loaded them"
    asked = [e.command(f"stacks {w.worker_id}") for w in (source, first) if w is not None]
    remedy, late = f"See what they do: {', '.join(asked)}", age_s > e.late_s
    return finding(subject, first.culprit(), because, age_s, following, remedy, late=late)


def _user_code(e: Evidence, subject: str, worker: WorkerEvidence, wait: Wait) -> Diagnosis:
    kind, setting, hint = _USER_CODE[wait.kind]
    group = f"one of {wait.count} groups" if wait.count > 1 else "one group"
    because, following = f"called by {worker.words} for {group}", ""
    if wait.limit_s:
        # The wait includes the queue before the call.
        left = f"in {seconds(wait.left_s)}" if wait.left_s else "after its call's time"
        following = f"the attempt fails {left} ({setting} = {wait.limit_s:g})"
    remedy = f"See its stacks: {e.command(f'stacks {worker.worker_id}')}; {hint}"
    culprit, age_s = Culprit(kind, wait.of), wait.age_s
    late = age_s > e.late_s
    return finding(subject, culprit, because, age_s, following, remedy, late=late)


def _engine(e: Evidence, subject: str, worker: WorkerEvidence, wait: Wait) -> Diagnosis:
    hung = wait.kind is WaitKind.ENGINE and worker.still_s > STILL_S
    # Long generations are usual: only an engine that makes no token is late.
    late = hung or (wait.kind is WaitKind.VERDICT and wait.age_s > e.late_s)
    because, age_s, following = wait.what, wait.age_s, ""
    if hung:
        age_s = worker.still_s
        because = f"whose engine has made no token for {seconds(age_s)}"
        if worker.wedged_in_s is not None:
            following = f"it is declared dead in {seconds(worker.wedged_in_s)}"
    remedy = e.look_at(worker.worker_id)
    return finding(subject, worker.culprit(), because, age_s, following, remedy, late=late)


def _scorer(e: Evidence, subject: str, wait: Wait) -> Diagnosis:
    """No worker of the scorer ``wait.of`` is alive, or those that are alive have not answered."""
    pool, known = pool_of(SCORER, wait.of), e.state.fleet.workers
    workers = [w for w in e.workers if w.worker_id in known and known[w.worker_id].pool == pool]
    first, late = worker_name(pool, 0), wait.age_s > e.late_s
    because = wait.what.removeprefix(f"waiting for scorer {wait.of}").strip(": ")
    alive, severity = len(e.state.fleet.living_in(pool)), Severity.WARNING
    more = e.command(f"scale {pool}={alive + 1}")
    remedy = f"{e.look_at(first)}, or add workers: {more}"
    if not alive:
        because, severity = "none is alive", Severity.ERROR
        remedy = f"See why: {e.command(f'logs {first}')}"
    elif silent := [w for w in workers if e.silent(w)]:
        because = f"{silent[0].words} does not report"
    elif all(w.lifecycle is Lifecycle.STARTING for w in workers):
        because = "which starts"
    culprit = Culprit(CulpritKind.SCORER, f"scorer {wait.of}")
    waiting = f"{plural(wait.count, 'group')} wait{'s' * (wait.count == 1)}"
    following, age_s = f"{waiting}, and no attempt fails", wait.age_s
    return finding(
        subject, culprit, because, age_s, following, remedy, late=late, severity=severity
    )


def loads(e: Evidence) -> Diagnosis | None:
    """The rollout worker with the most failed loads of weights since its last success."""
    workers = e.state.fleet.living(Role.ROLLOUT)
    failing = [w for w in workers if w.load_trouble and e.of(w.worker_id) is not None]
    worst = max(failing, key=lambda worker: worker.load_failures, default=None)
    if worst is None:
        return None
    remedy = f"See its log: {e.command(f'logs {worst.worker_id}')}"
    # In the words of CUDA and of torch, and of the kernel for memory that processes share.
    if any(sign in worst.load_trouble.lower() for sign in ("memory", "no space left")):
        remedy = (
            "Give its host or GPU more memory, or let its engine take less of it: "
            "paceline plan memory shows what each part needs"
        )
    times = plural(worst.load_failures, "time")
    also = f", like {len(failing) - 1} more" if len(failing) > 1 else ""
    because = f"which got weights and failed {times} to load them{also} ({worst.load_trouble})"
    following = "it gets them again over another link, and ends after 3 failures in a row"
    severity = Severity.ERROR if len(failing) == len(workers) else Severity.WARNING
    culprit = Culprit(CulpritKind.WORKER, worst.worker_id, worst.host, worst.pid)
    return Diagnosis("the run", culprit, because, 0.0, following, remedy, severity)
