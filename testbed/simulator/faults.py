"""Fault schedules: what a seed makes of the fleet, and everything that goes wrong in it."""

import random
from collections.abc import Callable
from dataclasses import replace

from controller.ledger.specs import EvalSet, RunSpec
from controller.services import admin
from paceline.v1 import admin_pb2
from testbed.simulator.cluster import Shape
from testbed.simulator.lies import Liar
from testbed.simulator.policy import SimulatedPolicyWorker
from testbed.simulator.turn_faults import plan_turns, with_turns
from testbed.simulator.virtual_time import Process
from testbed.simulator.worker import SimulatedWorker
from testbed.simulator.world import World

FATES = ("kills", "fails", "bad")
GROUP_FATES = ("kills", "names", "vanishes")


def draw_shape(rng: random.Random) -> Shape:
    """A small run in a bad neighbourhood."""
    steps = rng.randrange(3, 8)
    mean_generate = rng.choice([0.5, 1.0, 2.0])
    group_s = rng.choice([0.05, 0.15, 0.4])
    messy = rng.random()
    fates = {rng.randrange(30): rng.choice(FATES) for _ in range(rng.choice([0, 0, 1, 2]))}
    spec = RunSpec(
        run_id="sim",
        run_name="sim",
        seed=rng.randrange(1 << 30),
        steps=steps,
        groups_per_step=rng.randrange(1, 6),
        group_size=2,
        max_staleness=rng.choice([0, 0, 1, 1, 2, 4]),
        max_attempts=rng.choice([2, 3, 3, 5]),
        dataset_rows=rng.choice([1, 7, 50]),
        eval_rows=rng.choice([0, 0, 2, 3]),
        eval_every=rng.randrange(1, 5),
        checkpoint_every=rng.randrange(1, 5),
        filter_uninformative=rng.random() < 0.3,
        shuffle=rng.random() < 0.8,
        desired={"policy": 2, "rollout": 2},
        eval_drop=0.1,
    )
    shape = Shape(
        spec=spec,
        controllers=rng.choice([1, 2, 2, 3]),
        policy=rng.choice([1, 2, 2, 3]),
        rollout=rng.choice([1, 2, 2, 3]),
        slots=rng.choice([1, 2, 4]),
        group_s=lambda r: r.uniform(0.5, 1.5) * group_s,
        generate_s=lambda r: r.expovariate(1.0 / mean_generate),
        loss=0.03 * messy,
        duplicate=0.06 * messy,
        delay=rng.choice([0.005, 0.02]),
        forgetful=0.06 * messy,
        torn=rng.choice([0.0, 0.0, 0.05]),
        lag=rng.choice([0.0, 0.0, 0.5]),
        payload_files=rng.random() < 0.5,
        fates=fates,
    )
    if rng.random() < 0.25:
        spec = replace(spec, bounds={"rollout_spares": 1})
    shape = replace(shape, spec=with_eval_sets(spec))
    return _with_relays(_with_untrainable_groups(with_slow_groups(shape)))


def _with_relays(shape: Shape) -> Shape:
    """Two runs in five have more rollout workers, which hand weights on."""
    rng = random.Random(shape.spec.seed + 3)
    if rng.random() >= 0.4:
        return shape
    spec = replace(shape.spec, relay_fanout=rng.choice([1, 1, 2]))
    return replace(shape, spec=spec, rollout=rng.choice([3, 4, 5]))


def with_eval_sets(spec: RunSpec) -> RunSpec:
    """Two runs in five are judged on one or two named sets as well, some of them by another one's
    metric."""
    rng = random.Random(spec.seed + 2)
    if rng.random() >= 0.4:
        return spec
    sets = (
        EvalSet("a", rng.choice([1, 3]), rng.choice([1, 4]), rng.choice([0, 1, 3])),
        EvalSet("b", rng.choice([2, 4]), 3, rng.choice([0, 2])),
    )[: rng.choice([1, 2])]
    metric = rng.choice(["", f"a/pass@{sets[0].samples}", "a/reward"])
    return replace(spec, eval_sets=sets, best_metric=metric)


def with_slow_groups(shape: Shape) -> Shape:
    """Most runs train late groups, some with a bound so tight that tokens are masked. In half of
    the runs one group in eight takes ten times as long as others."""
    rng = random.Random(shape.spec.seed)
    spec = replace(
        shape.spec,
        late_groups=rng.choice(["train", "train", "drop"]),
        max_token_age=shape.spec.max_staleness + rng.choice([0, 0, 1, 8]),
    )
    if rng.random() < 0.5:
        return replace(shape, spec=spec)
    usual = shape.generate_s
    return replace(
        shape,
        spec=spec,
        generate_s=lambda r: usual(r) * (10.0 if r.random() < 0.125 else 1.0),
    )


def _with_untrainable_groups(shape: Shape) -> Shape:
    """Two runs in five have one or two groups that no trainer can train."""
    rng = random.Random(shape.spec.seed + 1)
    if rng.random() >= 0.4:
        return shape
    fates = {rng.randrange(20): rng.choice(GROUP_FATES) for _ in range(rng.choice([1, 2]))}
    return replace(shape, group_fates=fates)


def plan_faults(world: World, until: float) -> None:
    """Draws faults and when they strike, from the world's own seed."""
    rng = world.rng
    count = rng.choice([0, 2, 4, 6, 8, 12])
    for _ in range(count):
        strike = rng.choice(_FAULTS)
        world.timeline.after(rng.uniform(0.5, until), strike, world)


def _workers(world: World, prefix: str = "") -> list[SimulatedWorker]:
    return [w for w in world.workers.values() if w.alive and w.name.startswith(prefix)]


def _kill_worker(world: World) -> None:
    if victims := _workers(world):
        world.crash(world.rng.choice(victims))


def kill_all_policy(world: World) -> None:
    for victim in _workers(world, "policy"):
        world.crash(victim)


def _kill_leader(world: World) -> None:
    name = world.redis.leader or world.controller_names[0]
    world.crash_controller(name, world.rng.uniform(0.3, 4.0))


def _kill_controllers(world: World) -> None:
    for name in world.controller_names:
        world.crash_controller(name, world.rng.uniform(0.5, 3.0))


def _power_cut(world: World) -> None:
    _kill_controllers(world)
    for victim in _workers(world):
        world.crash(victim)
    _redis_away(world)


def _stop_one(world: World) -> None:
    """SIGSTOP, and SIGCONT later: longer than any lease, or not."""
    if victims := [p for p in world.everyone() if p.alive and not p.stopped]:
        _freeze(world, world.rng.choice(victims), world.rng.choice([0.5, 1.5, 5.0]))


def _stop_leader(world: World) -> None:
    leader = world.controllers.get(world.redis.leader)
    if leader is not None and leader.alive and not leader.stopped:
        _freeze(world, leader, world.rng.choice([0.8, 1.5, 4.0]))


def _freeze(world: World, victim: Process, delay: float) -> None:
    victim.stop()
    world.timeline.after(delay, victim.resume)


def jump_clocks(world: World) -> None:
    """The wall clock of every process is set an hour forward or back, each by itself."""
    for process in world.everyone():
        process.set_clock(world.rng.choice([-3600.0, 3600.0]))


def _redis_away(world: World) -> None:
    if not world.redis.process.stopped:
        for name in world.controller_names:
            _cut(world, name, "redis", world.rng.uniform(0.3, 3.0))


def lose_tail(world: World, entries: int = 0) -> None:
    """The journal's Redis fails over to a replica that lags, by ``entries`` (0: any number)."""
    if not world.oracle.finished:
        world.redis.lose_tail(entries or world.rng.choice([1, 1, 2, 3, 6, 12]))
        world.oracle.tail_lost()


def _partition(world: World) -> None:
    """One process loses some others for a while."""
    rng = world.rng
    names = [p.name for p in world.everyone()]
    one = rng.choice(names)
    delay = rng.choice([0.5, 2.0, 6.0])
    for other in names:
        if other != one and rng.random() < 0.6:
            _cut(world, one, other, delay)


def _leader_without_redis(world: World) -> None:
    if world.redis.leader:
        _cut(world, world.redis.leader, "redis", world.rng.uniform(0.8, 4.0))


def _cut(world: World, a: str, b: str, delay: float) -> None:
    world.network.cut(a, b)
    world.timeline.after(delay, world.network.mend, a, b)


def _drop_session(world: World) -> None:
    """A connection breaks and the worker lives."""
    workers = list(world.workers.values())
    victim = world.rng.choice(workers)
    for controller in world.controllers.values():
        controller.call_soon(controller.session_lost, victim.name, victim.incarnation)


def _drain_one(world: World) -> None:
    rng = world.rng
    # Replaced: otherwise most drains would be refused, for the sake of the least wanted.
    worker_id = rng.choice(list(world.workers))
    request_id = f"drain-{rng.random()}"
    request = admin_pb2.DrainRequest(request_id=request_id, worker_id=worker_id, replace=True)
    world.ask(admin.drain, request)
    if rng.random() < 0.5:
        world.ask(admin.drain, request)


def _join_one(world: World) -> None:
    role = world.rng.choice(["policy", "rollout"])
    world.start_worker(f"{role}-{len(world.workers)}")


def _pause(world: World) -> None:
    rng = world.rng
    key = rng.random()
    pause = admin_pb2.PauseRequest(request_id=f"pause-{key}", paused=True)
    resume = admin_pb2.PauseRequest(request_id=f"resume-{key}", paused=False)
    world.ask(admin.pause, pause)
    world.timeline.after(rng.uniform(0.5, 3.0), world.ask, admin.pause, resume)


def _suspend(world: World) -> None:
    """Somebody stops the run for now, perhaps hurries the stop, and lets the run go on."""
    rng = world.rng
    key = rng.random()
    first, last = sorted(rng.choices(admin_pb2.SuspendStage.values()[1:], k=2))
    for delay, stage in ((0.0, first), (rng.uniform(0.1, 2.0), last)):
        request = admin_pb2.SuspendRequest(request_id=f"suspend-{key}-{stage}", stage=stage)
        world.timeline.after(delay, world.ask, admin.suspend, request)
    go_on = admin_pb2.ContinueRequest(request_id=f"continue-{key}")
    world.timeline.after(rng.uniform(2.0, 6.0), world.ask, admin.continue_, go_on)


def _scale(world: World) -> None:
    request_id, desired = f"scale-{world.rng.random()}", {"rollout": world.rng.randrange(1, 4)}
    request = admin_pb2.ScaleRequest(request_id=request_id, desired=desired)
    world.ask(admin.scale, request)
    world.ask(admin.scale, request)


def _wedge(world: World) -> None:
    if victims := _workers(world, "policy"):
        world.rng.choice(victims).wedged = True


def _flip_bit(world: World) -> None:
    """One replica's weights differ from now on; it does not know."""
    mesh = world.oracle.ledger.state.fleet.mesh
    if mesh is None or mesh.broken or len(mesh.members) < 2:
        return
    member = mesh.members[world.rng.randrange(1, len(mesh.members))]
    worker = world.workers.get(member.worker_id)
    if isinstance(worker, SimulatedPolicyWorker) and worker.alive and worker.state:
        world.oracle.corrupt()
        worker.state += "!"


def flip_bit_of_checkpoint(world: World) -> None:
    """The replica that writes the checkpoints diverges, and its next checkpoint is wrong."""
    mesh = world.oracle.ledger.state.fleet.mesh
    # Of two replicas the first one is believed.
    if mesh is not None and not mesh.broken and len(mesh.members) > 2:
        worker = world.workers.get(mesh.members[0].worker_id)
        if isinstance(worker, SimulatedPolicyWorker) and worker.alive:
            worker.damaged_at_save = True


def _stop_run(world: World) -> None:
    if world.rng.random() < 0.1:
        world.ask(admin.stop, admin_pb2.StopRequest(request_id="stop", reason="enough"))


_WEIGHTS: dict[Callable[[World], None], int] = {
    _kill_worker: 3,
    kill_all_policy: 1,
    _kill_leader: 2,
    _kill_controllers: 1,
    _power_cut: 1,
    _stop_one: 2,
    _stop_leader: 2,
    _redis_away: 1,
    lose_tail: 1,
    _partition: 2,
    _leader_without_redis: 1,
    _drop_session: 1,
    _drain_one: 1,
    _join_one: 1,
    _pause: 1,
    _suspend: 1,
    _scale: 1,
    _wedge: 1,
    _flip_bit: 1,
    flip_bit_of_checkpoint: 1,
    _stop_run: 1,
}
_FAULTS = [fault for fault, weight in _WEIGHTS.items() for _ in range(weight)]


def run_schedule(
    seed: int, *, fenced: bool = True, trace: bool = False, lies: bool = True, turns: float = 0.0
) -> World:
    """Runs one seed to its end. Raises what it found. ``lies``: two runs in five have a liar.
    ``turns``: share of the runs whose workers take turns at devices."""
    rng = random.Random(seed * 2654435761 % (1 << 32))
    shape = with_turns(draw_shape(rng), turns)
    world = World(seed, replace(shape, fenced=fenced))
    if trace:
        world.print_entries()
    until = world.rng.uniform(4.0, 18.0)
    plan_faults(world, until)
    if world.shape.seats:
        plan_turns(world, until)
    if lies:
        Liar(world, seed).plan(until)
    world.run(quiet_after=until + 8.0)
    return world
