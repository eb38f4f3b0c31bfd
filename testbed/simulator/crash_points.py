"""Crash-and-resume points: each role of a small run is killed at a seeded instant, and the run goes
on to its end.

A point strikes a seeded number of journal entries after the one before it, so that points are
spread over everything the journal records. The oracle then accounts for every row: none skipped,
none trained twice.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from controller.ledger.specs import RunSpec
from controller.services import admin
from paceline.dataset.data_order import DataSource, shares
from paceline.v1 import admin_pb2
from testbed.simulator.cluster import Shape
from testbed.simulator.faults import with_slow_groups
from testbed.simulator.turn_faults import Doom, arm, lend_often
from testbed.simulator.world import World

LATEST_S = 40.0
"""No point strikes later than this, in seconds of the run."""


def draw_shape(rng: random.Random) -> Shape:
    """Runs of a few seconds over a data set that they go through at least once. Most train late
    groups."""
    group_s = rng.choice([0.05, 0.2])
    spec = RunSpec(
        run_id="sim",
        run_name="sim",
        seed=rng.randrange(1 << 30),
        steps=rng.randrange(5, 8),
        groups_per_step=rng.randrange(2, 4),
        group_size=2,
        max_staleness=rng.choice([0, 1, 2]),
        max_attempts=5,
        dataset_rows=rng.choice([3, 7, 11]),
        eval_rows=rng.choice([0, 2]),
        eval_every=rng.randrange(2, 5),
        checkpoint_every=rng.randrange(1, 5),
        filter_uninformative=rng.random() < 0.2,
        shuffle=rng.random() < 0.8,
        desired={"policy": 2, "rollout": 2},
    )
    shape = Shape(
        spec=spec,
        group_s=lambda r: r.uniform(0.5, 1.5) * group_s,
        generate_s=lambda r: r.expovariate(2.0),
    )
    return with_slow_groups(shape)


def with_sources(shape: Shape, rng: random.Random) -> Shape:
    """The same run over several sources, most of them with weights. Some rows are always solved."""
    rows = [rng.choice([2, 3, 5]) for _ in range(rng.choice([1, 2, 3]))]
    counts = shares([rng.choice([0.0, 0.2, 1.0, 3.0]) for _ in rows[1:]] + [1.0])
    if rng.random() < 0.3:
        counts = (0,) * len(rows)
    sources = tuple(
        DataSource(f"source_{n}", *fields)
        for n, fields in enumerate(zip(rows, counts, strict=True))
    )
    spec = replace(
        shape.spec,
        dataset_rows=sum(rows),
        sources=sources,
        steps=rng.randrange(8, 12),
    )
    # The last row stays one that is learnt from: a run that drops equal rewards would never end.
    solved = frozenset(row for row in range(sum(rows) - 1) if rng.random() < 0.5)
    return replace(shape, spec=spec, solved_rows=solved)


def _leader(world: World) -> bool:
    controller = world.controllers.get(world.redis.leader)
    if controller is None or not controller.alive:
        return False
    world.crash_controller(controller.name, world.rng.uniform(0.3, 2.0))
    return True


def _worker(role: str) -> Callable[[World], bool]:
    def strike(world: World) -> bool:
        victims = [w for w in world.workers.values() if w.alive and w.name.startswith(role)]
        if victims:
            world.crash(world.rng.choice(victims))
        return bool(victims)

    return strike


def _redis_tail(world: World) -> bool:
    """The journal's Redis fails over to a replica that lacks the newest entries."""
    world.redis.lose_tail(world.rng.choice([1, 2, 3, 6]))
    world.oracle.tail_lost()
    return True


def _whole_fleet(world: World) -> bool:
    """Every process ends at once. The same processes are started again, from journal and
    checkpoint."""
    for name in world.controller_names:
        world.crash_controller(name, world.rng.uniform(0.3, 1.5))
    for worker in list(world.workers.values()):
        world.crash(worker)
    return True


def _change_settings(world: World) -> None:
    """Learning rate and staleness change while the run runs: every attempt at a step must agree on
    them."""
    rng = world.rng
    settings = {
        "train.optimizer.lr": str(rng.choice([1e-4, 3e-5])),
        "train.max_staleness": str(rng.randrange(3)),
        "train.checkpoint_every": str(rng.randrange(1, 5)),
    }
    request = admin_pb2.SettingsRequest(request_id=f"set-{rng.random()}", settings=settings)
    world.ask(admin.change_settings, request)
    world.ask(admin.change_settings, request)


ROLES: dict[str, Callable[[World], bool]] = {
    "controller": _leader,
    "policy replica": _worker("policy"),
    "rollout worker": _worker("rollout"),
    "Redis tail": _redis_tail,
    "whole fleet": _whole_fleet,
}


def run_crash_points(seed: int, *, trace: bool = False, sources: bool = False) -> World:
    """Runs one seed to its end. Raises Violation; ``oracle.counts`` has the points by role.
    ``sources``: over a mixture of sources."""
    rng = random.Random(seed * 2654435761 % (1 << 32))
    shape = draw_shape(rng)
    world = World(seed, with_sources(shape, rng) if sources else shape)
    if trace:
        world.print_entries()
    roles = list(ROLES)
    rng.shuffle(roles)
    _arm(world, iter(roles), rng)
    world.timeline.after(rng.uniform(1.0, 8.0), _change_settings, world)
    if rng.random() < 0.25:
        world.extend_to = world.shape.spec.steps + 2
    world.run(quiet_after=LATEST_S)
    return world


def run_turn_point(doom: Doom, seed: int, *, lends: bool = False) -> World:
    """A run whose workers take turns, struck once at a moment of a turn. Raises Violation.
    ``lends``: the devices of three pairs are lent, and change their sides all the time."""
    rng = random.Random(f"{seed} {doom}")
    shape = draw_shape(rng)
    if lends:
        spec = replace(shape.spec, bounds={"training_seats": 1}, steps=shape.spec.steps + 4)
        world = World(seed, replace(shape, spec=spec, seats=3, policy=3, rollout=3))
        lend_often(world, rng.uniform(0.4, 1.5), LATEST_S)
    else:
        scorers = int(doom.role == "scorer")
        world = World(seed, replace(shape, seats=2, policy=rng.choice([1, 2]), scorers=scorers))
    arm(world, [doom], LATEST_S, rng)
    world.run(quiet_after=LATEST_S)
    return world


def _arm(world: World, roles: Iterator[str], rng: random.Random) -> None:
    """Has the next role struck once the journal has grown by a few entries."""
    role, left = next(roles, None), rng.randrange(1, 9)

    def landed() -> None:
        nonlocal left
        left -= 1
        if role is not None and left == 0:
            world.timeline.after(rng.uniform(0.0, 0.3), strike, role)

    def strike(role: str) -> None:
        if world.oracle.finished or world.timeline.now > LATEST_S:
            return
        if not ROLES[role](world):
            world.timeline.after(0.2, strike, role)  # it is not back yet from an earlier point
            return
        world.oracle.counts[f"points: {role}"] += 1
        _arm(world, roles, rng)

    world.watch = landed
