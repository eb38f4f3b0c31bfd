"""Seeded fault schedules over the controller that ships.

`pytest tests/unit/simulator/test_simulator.py --schedules 100000` runs as many as wanted.
"""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from controller.ledger import Ledger
from controller.ledger import events as ev
from controller.ledger.enums import Role
from controller.ledger.events import Topic
from controller.store.journal import Entry, Position
from paceline.observe.vocabulary import FaultCause
from testbed.simulator.crash_points import run_crash_points
from testbed.simulator.faults import (
    draw_shape,
    flip_bit_of_checkpoint,
    jump_clocks,
    kill_all_policy,
    lose_tail,
    plan_faults,
    run_schedule,
)
from testbed.simulator.world import World

CHUNKS = 4
FIRST_SEED = 1_000_000


def check_seed(seed: int, *, lies: bool = True) -> None:
    try:
        run_schedule(seed, lies=lies)
    except Exception as error:
        pytest.fail(
            f"{type(error).__name__}: {error}\n"
            f"again: python -m testbed.simulator --seed {seed} --verbose"
        )


@pytest.mark.timeout(0)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_promise_holds_under_random_faults(
    chunk: int, request: pytest.FixtureRequest
) -> None:
    schedules = request.config.getoption("--schedules")
    for seed in range(FIRST_SEED + chunk, FIRST_SEED + schedules, CHUNKS):
        check_seed(seed)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("first", range(6_000_000, 6_000_040, 10))
def test_every_promise_holds_if_workers_take_turns(first: int) -> None:
    """They park slowly, die at any moment of a turn, and lie about their seats."""
    counts: Counter[str] = Counter()
    for seed in range(first, first + 10):
        counts += run_schedule(seed, turns=1.0).oracle.counts
    assert counts["unparked"] > 50 and counts["lies about seats"] > 10


@pytest.mark.parametrize("seed", range(5_000_000, 5_000_020))
def test_every_promise_holds_if_wall_clocks_jump_among_other_faults(seed: int) -> None:
    """Leases, liveness and waits are measured by monotonic clocks."""
    world = World(seed, draw_shape(random.Random(seed)))
    plan_faults(world, 12.0)
    for after_s in 1.0, 3.0, 6.0, 9.0:
        world.timeline.after(after_s, jump_clocks, world)
    world.run(quiet_after=20.0)


@pytest.mark.parametrize(
    "seed",
    [385, 100683, 200798, 204238, 1000992, 1015330, 1018360, 2059576, 3094589, 3096264, 20002178],
)
def test_schedules_that_once_failed(seed: int) -> None:
    """A late record of a checkpoint by one that was taken for dead and is back was refused. A run
    that was stopped ended at a step whose weights had died with their last replica. A link epoch
    that was lost with the end of the journal was counted again, and the publisher took the new
    receiver for the old one. Redis lost the beginning of a term, the leader before it went on, and
    those that had seen the lost term followed no directive of it. The last rollout worker was to be
    replaced, and was not told to go once it had submitted its last group.
    """
    check_seed(seed, lies=False)


def test_a_seed_runs_the_same_way_in_every_process() -> None:
    """Of schedule 1000025, two leaders in six answered two long polls in the other order."""
    code = (
        "from testbed.simulator.faults import run_schedule\n"
        "world = run_schedule(1000025)\n"
        "print(world.timeline.now, world.rng.random(), len(world.redis.entries))"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "1")
    ]
    assert runs[0] == runs[1]


def test_replaying_the_journal_from_any_snapshot_gives_the_same_state() -> None:
    journal = [e for entry in run_schedule(11).redis.entries for e in entry.events]
    whole = Ledger()
    snapshots = []
    for event in journal:
        snapshots.append(json.dumps(whole.to_snapshot()))
        whole.apply(event)
    for at in range(0, len(journal), 7):
        ledger = Ledger.from_snapshot(json.loads(snapshots[at]))
        for event in journal[at:]:
            ledger.apply(event)
        assert ledger.fingerprint() == whole.fingerprint()


@pytest.mark.heavy
@pytest.mark.timeout(0)
def test_every_event_survives_the_journals_json_exactly() -> None:
    events: list[ev.Event] = [
        ev.RunFailed("a", "why", 1.5),
        ev.StopRequested("b", "enough"),
        ev.CheckpointRequested("c", 3),
        ev.BoundsSet({"policy_min": 1, "rollout_max": 4}),
        ev.Drained("d", "p1", {"policy": 2}),
        ev.ParityFailed("r0", 1, 1, "w"),
        ev.WeightsNotLoaded("r0", 1, 1, "out of memory"),
        ev.CheckpointVoided("p0", 5, 5, "checkpoints/step-5"),
        ev.WeightsWithdrawn("p0", 5, ("r0", "r1")),
        ev.OriginsDiffer("r1", "r0", ("rollout.environment",)),
        ev.SeatAsked("h/0", "why", 2.5),
        ev.SeatLent("h/0", Role.POLICY, "why", 2.5),
        ev.TrainingSeatsSet("f", 2, "why"),
        ev.HostBlocked("g", "h0", "3 faults"),
        ev.HostAllowed("h", "h0"),
        ev.HostKept("h0", "3 faults"),
        ev.WeightsStored("5-p0-1-00", "p0"),
        ev.ProcessFault("e", "redis", "h0", 7, FaultCause.OUT_OF_MEMORY, "by the kernel", 2.5),
    ]
    # Their settings change, and they are extended.
    for seed in (10, 13):
        events.extend(e for entry in run_crash_points(seed).redis.entries for e in entry.events)
    events.extend(e for entry in run_schedule(0, turns=1.0).redis.entries for e in entry.events)
    passing_over = run_crash_points(0, sources=True)
    events.extend(e for entry in passing_over.redis.entries for e in entry.events)
    # The first five have rare events; the others are for the case that they no longer do.
    for count, seed in enumerate((16, 4, 7, 33, 34, *range(60))):
        if count >= 10 and {type(event).__name__ for event in events} == set(ev.TYPES):
            break
        events.extend(e for entry in run_schedule(seed).redis.entries for e in entry.events)
    for event in events:
        written = json.loads(json.dumps(ev.to_json(event)))
        assert ev.from_json(written) == event and event.wakes <= frozenset(Topic)
        told = {"severity": str(event.severity), "text": event.text()} if event.listed else {}
        assert event.text() or not event.listed
        assert Entry(Position(), 1, 0.0, [written]).records == [{**written, **told}]
    assert {type(event).__name__ for event in events} == set(ev.TYPES)


@pytest.mark.heavy
def test_a_checkpoint_of_a_diverged_replica_is_never_restored() -> None:
    """In some seeds its record comes before the vote that finds out, in others after it."""
    counts: Counter[str] = Counter()
    for seed in range(40):
        shape = draw_shape(random.Random(seed))
        spec = replace(shape.spec, checkpoint_every=1, steps=8)
        world = World(seed, replace(shape, policy=3, controllers=1, spec=spec))
        world.timeline.after(3.0, flip_bit_of_checkpoint, world)
        world.timeline.after(world.rng.uniform(5.0, 9.0), kill_all_policy, world)
        world.run(quiet_after=12.0)
        counts += world.oracle.counts
    assert counts["voided checkpoints"] > 0
    assert counts["refused checkpoints"] > 0
    assert counts["rollbacks"] > 0


@pytest.mark.heavy
def test_a_lost_tail_of_the_journal_finds_the_payload_files_that_it_needs() -> None:
    """A checkpoint's record was in the tail: the run goes back to the one before, and needs its
    payloads."""
    counts: Counter[str] = Counter()
    # Of the last three the run ends wrongly if payloads are deleted before their record is safe.
    for seed in (*range(7), 15, 30, 31):
        shape = draw_shape(random.Random(seed))
        spec = replace(shape.spec, checkpoint_every=1, steps=20)
        shape = replace(shape, spec=spec, policy=2, rollout=3, controllers=2)
        world = World(seed, replace(shape, payload_files=True, lag=0.8))
        for when in (9.0, 13.0, 17.0):
            world.timeline.after(when, lose_tail, world, 15)
            world.timeline.after(when + 0.1, kill_all_policy, world)
        world.run(quiet_after=19.0)
        counts += world.oracle.counts
        counts["deleted payloads"] += world.redis.deleted
    assert counts["lost tails"] > 12 and counts["deleted payloads"] > 0
