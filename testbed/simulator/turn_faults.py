"""Faults of workers that take turns at devices: what strikes at a moment of a park or an unpark,
and lies about seats."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

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
    act: str  # park or unpark
    moment: str  # before, in or after

    def __str__(self) -> str:
        return f"{self.whom} {self.moment} {self.act} of {self.role}"


DOOMS = [
    Doom(*each)
    for each in product(
        ("worker", "partner", "leader", "tail"),
        ("policy", "rollout", "scorer"),
        ("park", "unpark"),
        ("before", "in", "after"),
    )
]


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
        world.timeline.after(rng.uniform(0.5, until), _lend, world, rng)
    for _ in range(rng.choice([0, 5, 20])):
        world.timeline.after(rng.uniform(0.5, until), _lie, world, rng)


def arm(world: World, dooms: Sequence[Doom], until: float, rng: random.Random) -> None:
    """Each of ``dooms`` strikes once, at its moment of the first turn or of the second."""
    left = {doom: rng.choice([0, 1]) for doom in dooms}

    def turning(worker: Process, act: str, moment: str) -> bool:
        here = (worker.name.partition("-")[0], act, moment)
        doom = next((d for d in left if (d.role, d.act, d.moment) == here), None)
        if doom is None or world.timeline.now > until:
            return False
        left[doom] -= 1
        if left[doom] >= 0:
            return False
        del left[doom]
        world.oracle.counts[f"struck in a turn: {doom.whom}"] += 1
        _strike(world, worker, doom.whom, rng)
        return doom.whom == "worker"

    world.turning = turning


def _strike(world: World, worker: Process, whom: str, rng: random.Random) -> None:
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


def _lend(world: World, rng: random.Random) -> None:
    """Somebody, or the policy, wants so many pairs to train."""
    request_id, desired = f"lend-{rng.random()}", {TRAINING: rng.randrange(1, world.shape.seats)}
    world.ask(admin.scale, admin_pb2.ScaleRequest(request_id=request_id, desired=desired))
    world.oracle.counts["lent"] += 1


def _lie(world: World, rng: random.Random) -> None:
    """A worker names another's grant, one that is over, or one that never was. That it has parked
    under its own grant, or under a later one that may be lost, nobody could know better."""
    seats = list(world.oracle.ledger.state.fleet.seats.by_name.values())
    liars = [w for w in world.workers.values() if w.alive and w.seat and w.incarnation]
    if seats and liars:
        liar, grant = rng.choice(liars), rng.choice(seats).grant + rng.choice([-1, 0, 2000])
        who, parked = (liar.name, liar.incarnation), rng.random() < 0.7
        # Its grant may be on its way to it, and a later one may be lost.
        believed = parked and any(s.holder == who and grant >= s.grant for s in seats)
        if grant > 0 and grant != liar.directive.seat.grant and not believed:
            liar.says((grant, parked))
            world.oracle.counts["lies about seats"] += 1
