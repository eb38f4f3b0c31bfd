"""Faults of workers that take turns at devices: what strikes at a moment of a park or an unpark,
and lies about seats."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from controller.ledger import events as ev
from controller.services import admin
from paceline.v1 import admin_pb2
from paceline.worker_pools import TRAINING
from testbed.simulator.cluster import Shape
from testbed.simulator.virtual_time import Process
from testbed.simulator.world import World


@dataclass(frozen=True, slots=True)
class Doom:
    """Strikes ``whom`` as soon as a worker of ``role`` comes to this moment of its turn."""

    whom: str
    """worker: itself; partner: the others at its devices; leader; tail: of the journal."""
    role: str
    act: str  # park, unpark; or that its seat is lent to its side (loan), returned, or granted
    moment: str  # before, in or after; of what the journal has: in, as the entry lands, or after

    def __str__(self) -> str:
        return f"{self.whom} {self.moment} {self.act} of {self.role}"


WHOM, BOTH = ("worker", "partner", "leader", "tail"), ("policy", "rollout")
DOOMS = [
    Doom(*each)
    for each in product(WHOM, (*BOTH, "scorer"), ("park", "unpark"), ("before", "in", "after"))
]
LOANS = [Doom(*each) for each in product(WHOM, BOTH, ("loan", "return", "grant"), ("in", "after"))]
"""Moments of the journal."""


def with_turns(shape: Shape, share: float) -> Shape:
    """This share of the runs has workers that take turns, all or some of them, in some with scorers
    at the devices. In a third of these the devices are lent: some train while others generate."""
    rng = random.Random(shape.spec.seed + 4)
    if rng.random() >= share:
        return shape
    spec = replace(shape.spec, bounds={})
    if rng.random() < 0.67:
        seats, scorers = rng.choice([1, shape.policy, 3, 5]), rng.choice([0, 1, 1, 3])
        return replace(shape, spec=spec, seats=seats, scorers=scorers)
    pairs = rng.choice([2, 3, 4])
    spec = replace(spec, bounds={"training_seats": rng.randrange(1, pairs)})
    return replace(shape, spec=spec, seats=pairs, policy=pairs, rollout=pairs)


def plan_turns(world: World, until: float) -> None:
    """Draws what strikes until then, by a generator of its own."""
    rng = random.Random(f"turns {world.shape.spec.seed}")
    arm(world, rng.sample(DOOMS, rng.choice([0, 1, 2, 4])), until, rng)
    for _ in range(rng.choice([1, 3, 8]) if world.shape.spec.bounds else 0):
        training = rng.randrange(1, world.shape.seats)
        world.timeline.after(rng.uniform(0.5, until), lend, world, f"lend-{rng.random()}", training)
    for _ in range(rng.choice([0, 5, 20])):
        world.timeline.after(rng.uniform(0.5, until), _lie, world, rng)
    if rng.random() < 0.5:
        world.timeline.after(rng.uniform(2.0, 6.0), _lose_registration, world)


def _lose_registration(world: World) -> None:
    """Redis fails over and lacks the newest registration, and all grants since."""
    for lost, entry in enumerate(reversed(world.redis.entries[-25:]), 1):
        if any(isinstance(e, ev.WorkerRegistered) for e in entry.events):
            world.oracle.counts["lost registrations"] += 1
            world.redis.lose_tail(lost)
            world.oracle.tail_lost()
            break


def arm(world: World, dooms: Sequence[Doom], until: float, rng: random.Random) -> None:
    """Each of ``dooms`` strikes once, at its moment of the first turn or of the second."""
    left = {doom: rng.choice([0, 1]) for doom in dooms}

    def due(worker_id: str, act: str, moment: str) -> Doom | None:
        here = (worker_id.partition("-")[0], act, moment)
        doom = next((d for d in left if (d.role, d.act, d.moment) == here), None)
        if doom is None or world.timeline.now > until:
            return None
        left[doom] -= 1
        if left[doom] >= 0:
            return None
        del left[doom]
        return doom

    def turning(worker: Process, act: str, moment: str) -> bool:
        if (doom := due(worker.name, act, moment)) is None:
            return False
        _strike(world, worker, doom.whom, rng)
        return doom.whom == "worker"

    def landed() -> None:
        for event in world.redis.entries[-1].events:
            match event:
                case ev.SeatLent():
                    act, name = "loan", f"{event.role}-{event.seat.rpartition('/')[2]}"
                case ev.SeatReturned():
                    act, name = "return", event.worker_id
                case ev.SeatGranted():
                    act, name = "grant", event.worker_id
                case _:
                    continue
            for moment, delay in ("in", 0.0), ("after", rng.uniform(0.0, 0.3)):
                if doom := due(name, act, moment):
                    world.timeline.after(delay, strike, name, doom.whom)

    def strike(name: str, whom: str) -> None:
        worker = world.workers[name]
        if whom == "worker":
            world.crash(worker)
        _strike(world, worker, whom, rng)

    world.turning, world.watch = turning, landed


def _strike(world: World, worker: Process, whom: str, rng: random.Random) -> None:
    """``worker`` itself is ended by the caller."""
    world.oracle.counts[f"struck in a turn: {whom}"] += 1
    if whom == "leader":
        world.crash_controller(world.redis.leader or "controller-0", rng.uniform(0.3, 2.0))
    elif whom == "tail" and not world.oracle.finished:
        world.redis.lose_tail(rng.choice([1, 2, 3, 6]))
        world.oracle.tail_lost()
    elif whom == "partner":
        device = world.seat_of(worker.name).partition(":")[0]
        for other in list(world.workers.values()):
            if other is not worker and other.seat.partition(":")[0] == device:
                world.crash(other)


def lend_often(world: World, every_s: float, until: float) -> None:
    """One pair trains and two do, in turn."""
    for n in range(int(until / every_s)):
        world.timeline.after(n * every_s, lend, world, f"lend-{n}", 1 + n % 2)


def lend(world: World, request_id: str, training: int) -> None:
    """Somebody, or the policy, wants so many pairs to train."""
    desired = {TRAINING: training}
    world.ask(admin.scale, admin_pb2.ScaleRequest(request_id=request_id, desired=desired))
    world.oracle.counts["lent"] += 1


def _lie(world: World, rng: random.Random) -> None:
    """A worker names another's grant, one that is over, or one that never was. That it has parked
    under its own grant, of which it may not have heard yet, or under one that the journal may have
    lost, nobody could know better."""
    state = world.oracle.ledger.state
    seats = state.fleet.seats.by_name
    liars = [w for w in world.workers.values() if w.alive and w.seat in seats and w.incarnation]
    if liars:
        liar = rng.choice(liars)
        grant = rng.choice(list(seats.values())).grant + rng.choice([-1, 0, 2000])
        own, parked = seats[liar.seat], rng.random() < 0.7
        doubtful = own.grant <= grant < state.term or grant == liar.directive.seat.grant
        hides = parked and not liar.parked and own.holder != (liar.name, liar.incarnation)
        if grant > 0 and grant != own.grant and not doubtful and not hides:
            liar.says((grant, parked))
            world.oracle.counts["lies about seats"] += 1
