"""Invariants of the ledger's state: conservation, single training, staleness, order.
``check_counts`` takes constant time and runs after every event of a checked ledger; ``check``
recomputes everything from the tasks."""

from collections import Counter
from collections.abc import Iterator

from controller.ledger.decisions.membership import missing_at_work
from controller.ledger.enums import Kind, Role
from controller.ledger.state.fleet import Fleet
from controller.ledger.state.state import State
from controller.ledger.state.tasks import UNFINISHED, TaskState
from controller.ledger.state.token_ages import too_old, trained_tokens
from paceline.ids import Step, TaskId


def check_counts(s: State) -> Iterator[str]:
    """Conservation by the counters, and what must hold between events too."""
    t = s.tasks
    kept, dropped, dispatched = len(t.pending) + t.position, t.dropped.total(), t.cursor
    if kept + dropped != dispatched:
        yield f"{dispatched} tasks dispatched, {kept} + {dropped} accounted for"
    if s.run_spec is not None and t.trained != s.versions.step * s.run.groups_per_step:
        yield f"{t.trained} groups trained in {s.versions.step} steps"
    if min(t.leased, t.in_step, t.trained) < 0:
        yield "a count is negative"
    step = s.steps.open
    if step is not None and step.step != s.versions.step + 1:
        yield f"step {step.step} is open after step {s.versions.step}"


def check(s: State) -> list[str]:
    """All invariants, from scratch; one line for each that does not hold."""
    if s.run_spec is None:
        return []
    parts = (check_counts, _partition, _owners, _steps, _staleness, _versions, _fleet, _seats)
    return [line for part in parts for line in part(s)]


def _partition(s: State) -> Iterator[str]:
    t = s.tasks
    states = Counter(x.state for x in t.records.values() if x.kind is Kind.TRAIN)
    uncovered = sum(len(g) for g in s.steps.history.values())
    for state, count in (
        (TaskState.PENDING, len(t.pending)),
        (TaskState.LEASED, t.leased),
        (TaskState.READY, len(t.ready)),
        (TaskState.IN_STEP, t.in_step),
        (TaskState.TRAINED, uncovered),
    ):
        if states[state] != count:
            yield f"{states[state]} tasks are {state}, {count} are counted"
    for ordinal in t.pending:
        task = t.records.get(TaskId(f"t{ordinal}"))
        if task is None or task.state is not TaskState.PENDING:
            yield f"t{ordinal} is queued but not pending"
    for task_id in t.ready:
        if t.records[task_id].state is not TaskState.READY or t.records[task_id].group is None:
            yield f"{task_id} is among the ready but not ready"


def _owners(s: State) -> Iterator[str]:
    held: dict[str, list[str]] = {}
    for worker in s.fleet.workers.values():
        if worker.held and not worker.alive:
            yield f"{worker.worker_id} is {worker.lifecycle} and holds {len(worker.held)} tasks"
        for task_id in worker.held:
            held.setdefault(task_id, []).append(worker.worker_id)
    for task in s.tasks.records.values():
        holders = sorted(held.pop(task.task_id, []))
        owners = [task.owner] if task.leased else []
        if holders != owners:
            yield f"{task.task_id} is leased to {owners}, held by {holders}"
        if len(task.failures) >= s.run.max_attempts:
            yield f"{task.task_id} failed {len(task.failures)} times and is not quarantined"
    yield from (f"{task_id} is held by {names} and finished" for task_id, names in held.items())


def _compositions(s: State) -> Iterator[tuple[str, Step, tuple[TaskId, ...]]]:
    """(name, step, groups) of every step whose groups are in memory."""
    yield from ((f"step {n}", n, groups) for n, groups in s.steps.history.items())
    for n, groups in s.steps.replay.items():
        yield f"step {n}, to be trained again", n, groups
    if s.steps.open is not None:
        yield f"open step {s.steps.open.step}", s.steps.open.step, s.steps.open.groups


def _steps(s: State) -> Iterator[str]:
    seen: dict[str, str] = {}
    step = s.steps.open
    for name, n, groups in _compositions(s):
        # A group that could not be trained has left a step that is to be trained again.
        short = n in s.steps.replay and len(groups) < s.run.groups_per_step
        if len(groups) != s.run.groups_per_step and not short:
            yield f"{name} has {len(groups)} groups"
        for task_id in groups:
            if task_id in seen:
                yield f"{task_id} is in {seen[task_id]} and in {name}"
            seen[task_id] = name
            if task_id not in s.tasks.records:
                yield f"{task_id} of {name} is not in memory"
    if any(n <= s.versions.step for n in s.steps.replay):
        yield "a committed step is to be trained again"
    if any(n > s.versions.step or n <= s.versions.agreed.step for n in s.steps.history):
        yield "a composition is kept for a step that is covered or not committed"
    if step is None:
        return
    assigned = sorted(i for shard in step.shards.values() for i in shard)
    if assigned != list(range(len(step.groups))):
        yield f"the shards of step {step.step} are not a partition of its groups"
    mesh = s.fleet.mesh
    if mesh is None or mesh.epoch != step.mesh_epoch:
        yield f"step {step.step} belongs to epoch {step.mesh_epoch}, not to the mesh"
    elif set(step.shards) != set(mesh.names):
        yield f"step {step.step} has shards of others than the members of epoch {mesh.epoch}"
    elif not set(step.votes) <= set(step.shards):
        yield f"a stranger has voted for step {step.step}"


def _staleness(s: State) -> Iterator[str]:
    for _, n, groups in _compositions(s):
        for task_id in groups:
            task = s.tasks.records.get(task_id)
            if task is None or task.group is None:
                continue
            if s.staleness_changed:
                if not trained_tokens(s, task.group, n):
                    yield f"{task_id} has no token that step {n} trains"
            elif found := too_old(s, task.group, n):
                yield f"{task_id} is {found[0]} in step {n}: {found[1]}"


def _versions(s: State) -> Iterator[str]:
    v = s.versions
    if v.step_of(v.version) != v.step:
        yield f"version {v.version} is the state after step {v.step_of(v.version)}, not {v.step}"
    firsts = [epoch.first_version for epoch in v.epochs]
    if firsts != sorted(set(firsts)):
        yield f"version epochs do not rise: {firsts}"
    if v.step > s.run.steps:
        yield f"{v.step} steps of {s.run.steps} are committed"
    if v.checkpoint.step > v.step:
        yield f"the newest checkpoint is of step {v.checkpoint.step}, after step {v.step}"


def _fleet(s: State) -> Iterator[str]:
    f, newest = s.fleet, s.versions.version
    for worker in f.workers.values():
        if max(worker.state_version, worker.loaded_version) > newest:
            yield f"{worker.worker_id} has a version that was never committed"
    if f.mesh is not None:
        if f.mesh.epoch != f.mesh_epoch:
            yield f"the mesh is of epoch {f.mesh.epoch}, the newest is {f.mesh_epoch}"
        if not s.ended and not f.mesh.broken and len(f.members()) < len(f.mesh.members):
            yield f"epoch {f.mesh.epoch} has a dead member"
    if not s.ended and missing_at_work(s):
        yield f"{missing_at_work(s)} rollout workers should be at work and are spares"
    for link in f.links.values():
        if link.generation > f.link_generation:
            yield f"link {link.generation} is newer than the newest, {f.link_generation}"
    sources = {w.worker_id for w in f.sources(newest)}
    if sources and not s.over and (lost := [w for w in f.roots() if w.worker_id not in sources]):
        yield f"{lost[0].worker_id} sends weights and does not hold the newest state"
    for receiver in f.links:
        found = [receiver]
        while found[-1] in f.links and found[-1] not in found[:-1]:
            found.append(f.links[found[-1]].publisher)
        if found[-1] in f.links:
            yield f"{receiver} receives from what hangs on itself, or its publisher does"
    fresh = Fleet(workers=f.workers, links=f.links)
    for role in Role:
        if f.living(role) != fresh.living(role):
            yield f"the index of living workers differs for {role}"
    for worker_id in f.workers:
        if f.links_of(worker_id) != fresh.links_of(worker_id):
            yield f"the index of links differs for {worker_id}"
    unfinished = (x for x in s.tasks.records.values() if x.state in UNFINISHED)
    suspects = {x.task_id for x in unfinished if x.suspect}
    if suspects != set(s.tasks.suspects):
        yield f"suspect are {sorted(suspects)}, indexed {sorted(s.tasks.suspects)}"


def _seats(s: State) -> Iterator[str]:
    seats, living = s.fleet.seats, [w for role in Role for w in s.fleet.living(role)]
    held = []
    for seat in seats.by_name.values():
        holder = None if seat.holder is None else s.fleet.current(*seat.holder)
        if seat.holder is not None and (holder is None or holder.seat != seat.name):
            yield f"seat {seat.name} is held by {seat.holder}, who is dead or has another seat"
        held += [(seat, holder)] if holder is not None else []
        if seat.asked and holder is None:
            yield f"seat {seat.name} is asked for, and nobody holds it"
        if seat.grant > seats.grants:
            yield f"grant {seat.grant} of seat {seat.name} is newer than the newest"
    sides = {(seat.device, holder.role.side) for seat, holder in held}
    if len(sides) > len({device for device, _ in sides}):
        yield f"both sides hold seats of one device: {sorted(sides)}"
    doubtful = {seat.device for seat in seats.by_name.values() if seats.doubted or seat.strays}
    for worker in s.fleet.members():
        if (step := s.steps.open) is None or s.fleet.occupies(worker):
            continue
        # After a failover it gets the seat back once all others who may use it have parked.
        if (seat := seats.by_name[worker.seat]).holder is not None or seat.name not in doubtful:
            yield f"{worker.worker_id} of open step {step.step} does not hold its seat"
    if wrong := {w.seat for w in living} - {""} ^ set(seats.by_name):
        yield f"seats {sorted(wrong)} are not those of living workers"
