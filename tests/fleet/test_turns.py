"""A policy replica and a rollout worker that take turns at one device, on the CPU, as a user starts
them: they learn, survive kills around every switch, and need little more memory than one alone.
With PPO a reference and a critic park with the trainer, and a reward model has turns of its own."""

import collections
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from paceline.observe.fleet_file import FleetRecord
from testbed.faults.failpoints import TURNS
from testbed.fleets.launched_fleet import Event, LaunchedFleet
from testbed.fleets.local_run import SLOWLY, Up, write_run
from testbed.tiny_model import make_tiny_model, make_tiny_reward_model
from tests.fixtures.shared import Shared
from tests.fleet.conftest import Start

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NAMES = ("policy-0", "rollout-0", "scorer-helpful-0")
FIRST = {("policy-0", "parking"), ("rollout-0", "parking")}
"""Kills in every run; the others, and those of a scorer: tests/unit/simulator."""
PAIR = {"controllers": 2, "policy": 1, "rollout": 1, "sharing": "turns"}


@pytest.mark.long
# In every run a pair with staleness is the one that is killed below.
@pytest.mark.parametrize("staleness", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_pair_that_takes_turns_learns(start: Start, staleness: int) -> None:
    """With 0 this is the synchronous flow: each step is a turn of generation and one of
    training."""
    up = start(
        rows=256,
        train={
            "steps": 24,
            "groups_per_step": 16,
            "lr": 3e-3,
            "max_staleness": staleness,
            "eval_every": 12,
        },
        rollout={"group_size": 8, "max_sequences": 64},
        fleet=PAIR | {"controllers": 1},
    )
    assert up.wait() == 0, up.said()
    up.assert_sound()
    steps = [row for row in up.metrics() if row["kind"] == "step"]
    first, last = (sum(s["reward_mean"] for s in some) / 4 for some in (steps[:4], steps[-4:]))
    assert len(steps) == 24 and last > 0.9 and last > first + 0.1
    assert max(step["staleness_max"] for step in steps) == staleness
    turns = (up.run_dir / "logs" / "rollout-0.log").read_text().count(" unparked ")
    assert turns >= 24 / (1 + staleness)


# -- kills ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared[LaunchedFleet]]:
    def started() -> LaunchedFleet:
        where = tmp_path_factory.mktemp("turns")
        model = make_tiny_reward_model(where / "rm", make_tiny_model(where / "other", hidden=32))
        train = {"max_staleness": 1, "checkpoint_every": 3, "algorithm": "ppo", "kl_coef": 0.01}
        functions = dict.fromkeys([*SLOWLY["functions"], "scorer:helpful"], 1.0)
        return LaunchedFleet(
            where,
            fleet=PAIR,
            train=train,
            reward={"functions": functions},
            scorers={"helpful": {"kind": "reward_model", "path": str(model)}},
        )

    fleet = Shared(started)
    yield fleet
    fleet.close()


@pytest.fixture
def fleet(shared: Shared[LaunchedFleet], request: pytest.FixtureRequest) -> Iterator[LaunchedFleet]:
    running = shared.get()
    running.settled()
    yield running
    if shared.after(request.node):
        running.assert_sound()


def assert_one_holder(events: list[Event]) -> None:
    """No seat is given to a worker before the one before it has parked or died, and none to a
    scorer beside a replica."""
    holder: dict[str, str] = {}
    for event in events:
        match event["type"]:
            case "SeatGranted":
                assert event["seat"] not in holder, event
                beside = {*holder.values(), event["worker_id"]}
                assert not {"policy-0", "scorer-helpful-0"} <= beside, event
                holder[event["seat"]] = event["worker_id"]
            # After a failover others say that they have parked, too.
            case "SeatReturned" if holder.get(event["seat"]) == event["worker_id"]:
                del holder[event["seat"]]
            case "WorkerDied" | "WorkerLeft" | "WorkerRegistered":
                holder = {s: name for s, name in holder.items() if name != event["worker_id"]}


@pytest.mark.parametrize(
    ("name", "instant"),
    [
        pytest.param(name, instant, marks=() if (name, instant) in FIRST else pytest.mark.slow)
        for name in NAMES
        for instant in TURNS
    ],
)
def test_a_worker_that_is_killed_around_a_switch_costs_the_others_nothing(
    fleet: LaunchedFleet, name: str, instant: str
) -> None:
    at = fleet.mark()
    before = fleet.pids()
    fleet.fall(name, instant)
    fleet.first(lambda e: e["type"] == "WorkerRegistered" and e["worker_id"] == name, at)
    fleet.steps(3)
    assert {n for n in NAMES if fleet.pids()[n] != before[n]} == {name}
    fleet.mark()
    assert_one_holder([event for _, event in fleet.tail.events])


@pytest.mark.parametrize(
    "instant", ["TurnChanged", pytest.param("SeatReturned", marks=pytest.mark.slow), "SeatGranted"]
)
def test_a_switch_goes_on_under_the_next_leader(fleet: LaunchedFleet, instant: str) -> None:
    before, at = fleet.pids(), fleet.mark()
    *_, at = fleet.first(lambda e: e["type"] == instant, at)
    fleet.send(fleet.status().leader)
    fleet.first(lambda e: e["type"] == "TermBegun", at)
    fleet.steps(3)
    assert [fleet.pids()[n] for n in NAMES] == [before[n] for n in NAMES]
    assert_one_holder([event for _, event in fleet.tail.events])


KILLS = [(name, at) for name in ("rollout-0", "policy-0") for at in ("parking", "unpark")]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [{}, {"lora": {"rank": 4}}], ids=["weights", "adapters"])
def test_steps_after_kills_around_switches_are_those_of_an_undisturbed_run(
    tmp_path: Path, lora: dict[str, Any]
) -> None:
    """Loss and norm of the gradient, and the digest of the weights that each step began with."""
    digests: list[dict[int, set[str]]] = []
    figures: list[dict[int, list[float]]] = []
    last = 2 + 2 * len(KILLS)
    for kills in ([], KILLS):
        fleet = LaunchedFleet(
            tmp_path / ("disturbed" if kills else "undisturbed"),
            fleet=PAIR | {"controllers": 1},
            model=lora,
            train={"max_staleness": 0, "checkpoint_every": 2, "lr": 1e-3},
        )
        with closing(fleet):
            fleet.settled()
            for name, instant in kills:
                fleet.fall(name, instant)
                fleet.steps(2)
            fleet.until(lambda: fleet.up.step() >= last, 300.0)  # noqa: B023
            fleet.mark()
            fleet.assert_sound()
            votes = [event for _, event in fleet.tail.events if event["type"] == "VoteCast"]
            rows = [row for row in fleet.up.metrics() if row["kind"] == "step"]
        digests.append(collections.defaultdict(set))
        for vote in votes:
            digests[-1][vote["step"]].add(vote["digest"])
        figures.append({row["step"]: [row["loss"], row["grad_norm"]] for row in rows})
    steps = range(1, last + 1)
    calm, disturbed = ([of[step] for step in steps] for of in figures)
    gap = float(np.abs(np.array(calm) - np.array(disturbed)).max())
    same = sum(digests[0][step] == digests[1][step] for step in steps)
    print(f"loss and gradient norm differ by {gap:.3g} at most; digests equal: {same} of {last}")
    np.testing.assert_allclose(disturbed, calm, rtol=1e-4, atol=1e-6)
    assert len({tuple(pair) for pair in calm}) > last / 2  # they learn


# -- memory ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_pair_in_turns_needs_little_more_memory_than_the_larger_of_both(tmp_path: Path) -> None:
    """A model so large that weights dominate. On the CPU weights and moments of a parked trainer
    stay where they are, and all that a step needs beside them goes. The largest process is the
    trainer in its turn: it needs as much without a partner."""
    config = write_run(
        tmp_path,
        train={"steps": 2, "max_staleness": 0, "groups_per_step": 2, "eval_every": 100},
        rollout={"max_tokens": 4},
        fleet=PAIR | {"controllers": 1},
    )
    make_tiny_model(tmp_path / "model", hidden=1024, layers=8)
    up = Up(config, tmp_path / "run")
    largest, pair = 0, 0
    while up.process.poll() is None:
        record = FleetRecord.read(up.run_dir)
        workers = [p for p in record.processes if p.role != "controller"] if record else []
        sizes = [_memory(worker.ids[-1].pid) for worker in workers if worker.ids]
        largest = max([largest, *(rss for rss, _ in sizes)])
        pair = max(pair, sum(pss for _, pss in sizes))
        time.sleep(0.2)  # a look at the pages of a process takes a part of a core
    assert up.wait() == 0, up.said()
    assert 3 << 30 < pair <= 1.2 * largest, (pair, largest)


def _memory(pid: int) -> tuple[int, int]:
    """Bytes that it would need alone, and its share of what all processes need: libraries that
    several have mapped are there once."""
    try:
        found = psutil.Process(pid).memory_full_info()
    except psutil.Error:
        return 0, 0
    return int(found.rss), int(found.pss)
