"""Decisions about seats: whose turn it is, and who gets a seat that is free.

- *Training* gets the seats once enough groups for a step are ready, no further one may be leased,
  and those in flight are not worth a wait: with ``max_staleness`` = 0 there are none, above it what
  is left of them goes on in the next turn. Evaluations are finished first.
- *Generation* gets them once the ready groups no longer fill a step, and every member of the mesh
  holds the newest state: a replica parks with it, and sends the weights from host memory.
- If no replica holds the newest state, weights come to nobody: training gets the seats as soon as
  nothing is in flight, to restore it.

Scorers that share devices hold them with generation's turn, so that a group gets its scores in the
turn that it was generated in.

So each side waits only for what the other one does in its own turn. Joins, state transfers and the
steps need the turn of training. Links and checkpoints need none.

If seats are lent (``Seats.training``), each has a role of its own. A replica whose seat is asked
for leaves the mesh after its step, and joins again once it has it back. If the only replica with
the newest state is parked, its seat goes back to training. A seat whose worker of its side has died
or leaves does not count, and goes to the other side. The last seat that is left is held in turn.

A failover of Redis may lose grants. So a new leader gives a seat to nobody before all others who
may use it have said that they have parked (``Seat.strays``), or are dead. Registrations may be lost
too: it grants nothing before its term is as old as a lease (``Seats.doubted``).
"""

from collections.abc import Mapping

from controller.ledger import events as ev
from controller.ledger.decisions.commands import (
    CommandRefused,
    Decider,
    command,
    of_worker,
)
from controller.ledger.decisions.leases import admissible
from controller.ledger.decisions.steps import missing_groups
from controller.ledger.enums import Phase, Role
from controller.ledger.state.fleet import Worker
from controller.ledger.state.seats import Seat
from controller.ledger.state.state import State
from paceline.errors import RefusalCode
from paceline.ids import Step
from paceline.worker_pools import TRAINING

Turn = tuple[Role, str]  # The role that is to hold the seats, and why
LOST = "Redis has lost the end of the journal, and with it a grant"


def settle_seats(d: Decider, now: float) -> bool:
    """Changes the turn if that is due, and grants what is free; True if anything was decided."""
    seats, before = d.state.fleet.seats, d.state.fleet.seats.grants
    turn = next_turn(d.state)
    if turn is not None:
        d.emit(ev.TurnChanged(*turn, now))
    if d.state.over:
        return False
    for seat in seats.by_name.values():
        if seat.holder is not None:
            # One that held it by a loan, if seats are not lent any more; or the other way round.
            holder = d.state.fleet.workers[seat.holder[0]]
            strange = holder.role.side is not seats.role_of(seat) and not d.state.in_step(holder)
            if strange and not seat.asked:
                d.emit(ev.SeatAsked(seat.name, seats.why, now))
        elif (worker := _successor(d.state, seat)) and not _in_use(d.state, seat, worker):
            # Redis may have lost the newest grants: their numbers were below that of a new term.
            grant = max(seats.grants + 1, d.state.term)
            why = seat.why if seats.to_train else seats.why
            d.emit(ev.SeatGranted(seat.name, *worker.who, grant, why, now))
    return turn is not None or seats.grants > before


def settle_loans(d: Decider, now: float) -> None:
    """Lends what is due, before the next epoch is formed and the next step is opened."""
    while (loan := _next_loan(d.state)) is not None:
        d.emit(ev.SeatLent(*loan, now))


@command
def settle_turn(d: Decider, now: float) -> None:
    """The turn may be due to change."""
    d.settle_fleet(now)


@command
def end_doubt(d: Decider, now: float) -> None:
    """This term is as old as a lease: who is not registered by now has none."""
    if d.state.fleet.seats.doubted:
        d.emit(ev.SeatsCertain())
        d.settle_fleet(now)


def _successor(s: State, seat: Seat) -> Worker | None:
    """The worker whose turn it is; of several the one that stays."""
    side = s.fleet.seats.role_of(seat)
    roles = (role for role in Role if role.side is side)
    living = (w for role in roles for w in s.fleet.living(role) if w.seat == seat.name)
    living = (w for w in living if not s.fleet.shuns(w) or _awaited(s, w))
    return min(living, key=lambda w: (w.leaving, w.worker_id), default=None)


def _awaited(s: State, worker: Worker) -> bool:
    """Others wait for it with its seat, though its host is blocked: the mesh ends only once all its
    members have theirs, and a state that it alone holds has to be sent."""
    return s.fleet.in_mesh(worker) or worker.state_version == s.versions.version


def _in_use(s: State, seat: Seat, worker: Worker) -> bool:
    """True if somebody unknown or a stray may have the seat, or the other side something at its
    devices."""
    alike = [other for other in s.fleet.seats.by_name.values() if other.device == seat.device]
    users = {who for other in alike for who in (other.holder, *other.strays) if who is not None}
    strange = any(s.fleet.workers[name].role.side is not worker.role.side for name, _ in users)
    return s.fleet.seats.doubted or strange or bool({*seat.strays} - {worker.who})


@of_worker
def report_seat(
    d: Decider, now: float, worker: Worker, grant: int, parked: bool, seen_term: int
) -> None:
    """A worker says under which grant it uses its seat, or has parked. What does not concern the
    present grant of its holder changes nothing.

    ``seen_term``: of the newest directive that it has: an older one may still give it the seat."""
    s = d.state
    seat = s.fleet.seats.by_name.get(worker.seat)
    if seat is None or s.over:
        return
    lost = seat.grant < grant < s.term
    returns = parked and seat.holder == worker.who and (grant == seat.grant or lost)
    harmless = parked and worker.who in seat.strays and seen_term >= s.term
    if (returns and seat.asked) or harmless:
        d.emit(ev.SeatReturned(seat.name, *worker.who, seat.grant, now))
        d.settle_fleet(now)
        return
    forgotten = (returns or seat.grant < grant) and max(grant, seat.grant) < s.term
    if seat.holder is not None and not seat.asked and forgotten:
        # Only a new term can have lost a grant, or that it was asked for. The holder by the ledger
        # may have parked, and would never use the seat under its grant again.
        d.emit(ev.SeatAsked(seat.name, LOST, now))


def next_turn(s: State) -> Turn | None:
    """The role that is to hold the seats from here on, and why; None: the turn does not change."""
    seats = s.fleet.seats
    if not seats.by_name or seats.to_train or s.over or s.steps.open is not None:
        return None
    training = seats.turn is Role.POLICY
    if s.phase is not Phase.OPEN:
        return None if training else (Role.POLICY, "the run stops")
    if s.paused:
        return None
    why = _why_to_generate(s) if training else _why_to_train(s)
    return (Role.ROLLOUT if training else Role.POLICY, why) if why else None


def _why_to_generate(s: State) -> str:
    """Reason why training has nothing to do; empty if it has, or if it cannot park now."""
    fleet, step = s.fleet, Step(s.versions.step + 1)
    lacking = len(fleet.members()) - len(fleet.sources(s.versions.version))
    waiting = any(w.seat for w in fleet.living(Role.ROLLOUT))
    if fleet.whole_mesh is None or lacking or not waiting:
        return ""
    if step > s.run.steps:
        return "evaluations are left" if s.evals.rounds else ""
    missing = missing_groups(s)
    return f"step {step} misses {missing} of {s.run.groups_per_step} groups" if missing else ""


def _why_to_train(s: State) -> str:
    """Reason why generation has done what it can; empty if it has not."""
    run, step, newest = s.run, Step(s.versions.step + 1), s.versions.version
    evaluated = sum(r.open - len(r.pending) for r in s.evals.rounds.values())
    if not s.fleet.sources(newest) and not s.tasks.leased + evaluated:
        return f"no replica holds version {newest}"
    if s.evals.rounds:
        return ""
    if step > run.steps:
        return "all steps are trained"
    worth_a_wait = run.groups_per_step // 2 if run.max_staleness else 0
    if missing_groups(s) or admissible(s, newest) > 0 or s.tasks.leased > worth_a_wait:
        return ""
    return f"the groups of step {step} are ready"


# ---- lending ----------------------------------------------------------------------------------


def set_training(
    d: Decider, request_id: str, desired: Mapping[str, int], expected: Mapping[str, int], why: str
) -> None:
    """So many seats train from here on: ``desired`` is their number alone. Refused if that leaves a
    side without a seat."""
    seats, training = d.state.fleet.seats, desired[TRAINING]
    problem, code = "", RefusalCode.INVALID
    if not seats.training:
        problem = 'no devices are lent in this run: see fleet.sharing = "lend"'
    elif len(desired) > 1:
        problem = f"{TRAINING} moves devices between the roles: ask for it by itself"
    elif not 1 <= training < len(seats.by_name):
        problem = f"{TRAINING}={training}: of {len(seats.by_name)} pairs, each side needs one"
    elif expected.get(TRAINING, seats.training) != seats.training:
        code = RefusalCode.CHANGED
        problem = f"conflict: {seats.training} pairs train now; re-read the status and retry"
    if problem:
        raise CommandRefused(code, problem)
    d.emit(ev.TrainingSeatsSet(request_id, training, why))


def _next_loan(s: State) -> tuple[str, Role, str] | None:
    """The next seat that changes its side, to which, and why; None: all are as they should be.
    A member of an open step keeps its seat until the commit."""
    seats, count, fleet = s.fleet.seats, s.fleet.seats.to_train, s.fleet
    if not count or s.over:
        return None
    in_step = {w.seat for w in fleet.members() if s.in_step(w)}
    holding = {w.seat for w in fleet.holders(s.versions.version)}
    sides: dict[Role | None, list[str]] = {None: [], Role.POLICY: [], Role.ROLLOUT: []}
    for name in sorted(seats.by_name, key=lambda name: (name not in holding, name)):
        sides[seats.by_name[name].role].append(name)
    train, generate = _Side(s, Role.POLICY), _Side(s, Role.ROLLOUT)
    if new := [name for name in sides[None] if name not in in_step]:
        return new[0], Role.POLICY if len(sides[Role.POLICY]) < count else Role.ROLLOUT, "it is new"
    if holding and holding <= set(sides[Role.ROLLOUT]):
        name = sides[Role.ROLLOUT][0]
        return name, Role.POLICY, f"its replica alone holds version {s.versions.version}"
    training = [name for name in sides[Role.POLICY] if name not in train.lacking]
    generating = [name for name in sides[Role.ROLLOUT] if name not in generate.lacking]
    why = f"{count} of {len(seats.by_name)} pairs train: {seats.why}"
    able = [name for name in sides[Role.ROLLOUT] if name in train.staying]
    if able and len(training) < count:
        return able[0], Role.POLICY, why
    # The last to go is the one whose replica holds the state. If it alone does, it stays until
    # another one has received it.
    sole = holding if len(holding & set(sides[Role.POLICY])) == 1 else set()
    able = [name for name in training if name not in generate.lacking | in_step | sole]
    if able and len(training) > count:
        return able[-1], Role.ROLLOUT, why
    idle = [n for n in sides[Role.POLICY] if n not in train.living and n in generate.staying]
    if idle and len(training) >= count:
        return idle[0], Role.ROLLOUT, "it has no live replica"
    # If nobody generates, a replica takes the place of one whose seat can.
    idle = [n for n in sides[Role.ROLLOUT] if n not in generate.living and n in train.staying]
    if idle and not generating and any(name in generate.staying for name in training):
        return idle[0], Role.POLICY, "it has no live rollout worker"
    return None


class _Side:
    """Seats by what there is of the workers of one role."""

    def __init__(self, s: State, role: Role) -> None:
        workers = [w for w in s.fleet.workers.values() if w.role is role and w.seat]
        self.living = {w.seat for w in workers if w.alive}
        meant = (w for w in workers if w.alive and not w.leaving and not s.fleet.shuns(w))
        self.staying = {w.seat for w in meant}
        self.lacking = {w.seat for w in workers} - self.staying
        """Theirs have gone, or are to leave. One that has not come yet is waited for."""
