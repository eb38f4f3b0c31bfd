"""One real fleet, killed again and again: 2 controllers, 2 replicas, 2 rollout workers, Redis.

The fleet is started once. Every test waits until it is whole, does one thing to it, and asserts
what a user was promised; after each of them the journal is replayed and every sample is accounted
for.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from testbed.fleets.launched_fleet import Event, LaunchedFleet
from testbed.fleets.local_run import SLOWLY, Up, paceline
from tests.fixtures.shared import Shared

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

LEASE_S = 5.0
SLACK_S = 3.0
"""For machines that run other things meanwhile; benchmarks/recovery measures without it."""


@pytest.fixture(
    scope="module",
    params=["weights", *(pytest.param(p, marks=pytest.mark.slow) for p in ("lora", "store"))],
)
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shared[LaunchedFleet]]:
    """A fleet that trains the whole model, or adapters, or sends weights through a store."""

    def start() -> LaunchedFleet:
        where = tmp_path_factory.mktemp("fleet")
        sections = {"controller": {"snapshot_every": 300}, "reward": SLOWLY}
        if request.param == "lora":
            sections["model"] = {"lora": {"rank": 4}}
        if request.param == "store":
            sections["weights"] = {"url": (where / "stored").as_uri()}
        return LaunchedFleet(where, **sections)

    fleet = Shared(start)
    yield fleet
    fleet.close()


@pytest.fixture
def fleet(shared: Shared[LaunchedFleet], request: pytest.FixtureRequest) -> Iterator[LaunchedFleet]:
    running = shared.get()
    running.settled()
    yield running
    if not shared.after(request.node):
        return
    if running.up.process.poll() is None:
        running.assert_sound()
    assert not [e for _, e in running.tail.events if e.get("diverged")], "replicas differ"


def committed(event: Event) -> bool:
    return bool(event["type"] == "StepCommitted")


def died(worker_id: str) -> Callable[[Event], bool]:
    return lambda e: e["type"] == "WorkerDied" and e["worker_id"] == worker_id


def happened(fleet: LaunchedFleet, since: int, *types: str) -> list[Event]:
    fleet.mark()
    return [e for _, e in fleet.tail.events[since:] if e["type"] in types]


def assert_no_worker_noticed(fleet: LaunchedFleet, since: int, before: dict[str, int]) -> None:
    assert happened(fleet, since, "WorkerDied", "WorkerRegistered", "RolledBack") == []
    after = fleet.pids()
    workers = [name for name in before if name.startswith(("policy", "rollout"))]
    assert {n: after[n] for n in workers} == {n: before[n] for n in workers}


def leader_and_standby(fleet: LaunchedFleet) -> tuple[str, str]:
    leader = fleet.status().leader
    return leader, next(n for n in ("controller-0", "controller-1") if n != leader)


# -- controllers --------------------------------------------------------------------------------


@pytest.mark.long
def test_a_standby_comes_back_from_a_snapshot_and_leads_when_the_leader_dies(
    fleet: LaunchedFleet,
) -> None:
    leader, standby = leader_and_standby(fleet)
    before, at = fleet.pids(), fleet.mark()
    # Enough steps for a snapshot that has trimmed the beginning of the journal away.
    fleet.until(fleet.tail.has_snapshot)
    fleet.send(standby)
    fleet.steps(3)
    fleet.settled()
    fleet.send(leader)
    _, term, _ = fleet.first(lambda e: e["type"] == "TermBegun", at)
    assert term["controller_id"] == standby
    fleet.steps(3)
    assert_no_worker_noticed(fleet, at, before)


def test_all_controllers_at_once_cost_no_worker(fleet: LaunchedFleet) -> None:
    before, at = fleet.pids(), fleet.mark()
    for name in ("controller-0", "controller-1"):
        fleet.send(name)
    fleet.first(lambda e: e["type"] == "TermBegun", at)
    fleet.steps(3)
    assert_no_worker_noticed(fleet, at, before)


# -- Redis --------------------------------------------------------------------------------------


def test_embedded_redis_killed_is_started_again_and_nothing_is_lost(fleet: LaunchedFleet) -> None:
    before, at = fleet.pids(), fleet.mark()
    killed = fleet.redis_process()
    steps = fleet.status().step
    os.kill(killed.pid, signal.SIGKILL)
    fleet.until(lambda: fleet.redis_process() != killed)
    fleet.until(lambda: fleet.status().step >= steps + 3)
    assert_no_worker_noticed(fleet, at, before)


# -- policy replicas ----------------------------------------------------------------------------


def test_a_replica_killed_costs_no_step(fleet: LaunchedFleet) -> None:
    """Other instants, and the weights: tests/process/policy/test_policy_step_transaction.py."""
    at = fleet.mark()
    killed = fleet.fall("policy-1", "reduce")
    *_, after = fleet.first(died("policy-1"), at)
    t, step, _ = fleet.first(committed, after)
    assert t - killed < 1.0 + SLACK_S
    assert happened(fleet, at, "StepAborted", "RolledBack") == []
    numbers = [e["step"] for e in happened(fleet, at, "StepCommitted")]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert step["step"] in numbers


def test_a_replica_that_hangs_in_the_all_reduce_is_left_and_comes_back(
    fleet: LaunchedFleet,
) -> None:
    at = fleet.mark()
    stopped = fleet.fall("policy-1", "reduce", signal.SIGSTOP)
    t, event, after = fleet.first(died("policy-1"), at)
    assert event["how"] == "lease"
    assert t - stopped < LEASE_S + 1.0 + SLACK_S
    committed_t, *_ = fleet.first(committed, after)
    assert committed_t - stopped < LEASE_S + 1.0 + SLACK_S
    fleet.send("policy-1", signal.SIGCONT)
    fleet.first(joined_mesh("policy-1"), after)
    assert len(fleet.record().processes) == 6
    assert happened(fleet, at, "StepAborted", "RolledBack") == []


def joined_mesh(worker_id: str) -> Callable[[Event], bool]:
    return lambda e: (
        e["type"] == "MeshFormed" and worker_id in {m["worker_id"] for m in e["members"]}
    )


def test_all_replicas_at_once_resume_from_the_newest_checkpoint(fleet: LaunchedFleet) -> None:
    before = fleet.pids()
    fleet.until(lambda: fleet.status().checkpoint_step > 0)
    at = fleet.mark()
    for name in ("policy-0", "policy-1"):
        fleet.send(name)
    _, formed, after = fleet.first(lambda e: e["type"] == "MeshFormed" and e["restore"], at)
    assert formed["step"] > 0 and formed["checkpoint_path"]
    # The groups of the lost steps are trained again, in the same steps and no others.
    history: dict[int, tuple[str, ...]] = {}
    for _, e in fleet.tail.events[:after]:
        if e["type"] == "StepOpened":
            history[e["step"]] = tuple(e["groups"])
    for back in happened(fleet, at, "RolledBack"):
        lost = range(back["step"] + 1, back["from_step"] + 1)
        for number in lost:
            _, e, _ = fleet.first(
                lambda e, n=number: e["type"] == "StepOpened" and e["step"] == n, after
            )
            assert tuple(e["groups"]) == history[number]
    fleet.steps(3)
    rollouts = {n: pid for n, pid in fleet.pids().items() if n.startswith("rollout")}
    assert rollouts.items() <= before.items(), "rollout workers go on as they are"


# -- rollout workers ----------------------------------------------------------------------------


def test_a_killed_rollout_workers_tasks_go_to_others(fleet: LaunchedFleet) -> None:
    at = fleet.mark()
    killed = fleet.fall("rollout-1", "submit")
    t, event, _ = fleet.first(died("rollout-1"), at)
    assert t - killed < 1.0 + SLACK_S
    assert event["cause"] == "killed"
    released = [e["task_id"] for e in happened(fleet, at, "TaskReleased")]
    for task_id in released:
        t, *_ = fleet.first(leased_by("rollout-0", task_id), at)
        assert t - killed < LEASE_S + SLACK_S
    assert happened(fleet, at, "MeshBroken") == [], "no trainer waits for it"
    fleet.steps(3)


def leased_by(worker_id: str, task_id: str) -> Callable[[Event], bool]:
    return lambda e: (
        e["type"] == "TasksLeased"
        and e["worker_id"] == worker_id
        and task_id in {lease[0] for lease in e["leases"]}
    )


def test_a_stopped_rollout_worker_holds_nobody_up_and_is_taken_back(fleet: LaunchedFleet) -> None:
    at = fleet.mark()
    stopped = fleet.send("rollout-1", signal.SIGSTOP)
    t, event, after = fleet.first(died("rollout-1"), at)
    fleet.send("rollout-1", signal.SIGCONT)
    assert event["how"] == "lease" and t - stopped < LEASE_S + 1.0 + SLACK_S
    fleet.steps(3)
    pid = fleet.pids()["rollout-1"]
    _, again, _ = fleet.first(
        lambda e: e["type"] == "WorkerRegistered" and e["worker_id"] == "rollout-1", after
    )
    assert again["pid"] == pid, "the same process, as a new incarnation"
    assert happened(fleet, at, "MeshBroken") == []


@pytest.mark.parametrize("victim", ["rollout-1", pytest.param("policy-1", marks=pytest.mark.slow)])
def test_a_worker_starved_to_a_tenth_is_not_evicted(fleet: LaunchedFleet, victim: str) -> None:
    at = fleet.mark()
    fleet.starve(victim, LEASE_S + 2.0)
    assert happened(fleet, at, "WorkerDied") == []
    assert happened(fleet, at, "TaskReleased") == [], "its leases were not stolen"
    fleet.steps(3)


# -- anything ----------------------------------------------------------------------------------


@pytest.mark.timeout(600)
def test_seeded_chaos_breaks_no_promise(fleet: LaunchedFleet) -> None:
    command = [sys.executable, "-m", "testbed.faults.chaos", "--run-dir", str(fleet.run_dir)]
    command += ["--json", "--seed", "11", "--minutes", "0.3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220)
    verdict = json.loads(done.stdout)
    assert done.returncode == 0, verdict
    assert verdict["faults"] and verdict["votes_compared"] > 0


# -- the supervisor -----------------------------------------------------------------------------


def test_a_killed_supervisor_is_replaced_without_touching_the_fleet(fleet: LaunchedFleet) -> None:
    before, at = fleet.pids(), fleet.mark()
    fleet.up.process.kill()
    fleet.up.process.wait()
    # Nobody restarts anything meanwhile; the run itself goes on.
    while not happened(fleet, at, "StepCommitted"):
        fleet.tail.read(0.1)
    refused = paceline("up", str(fleet.config), "--run-dir", str(fleet.run_dir), "--attach",
                       "--set", "train.optimizer.lr=1e-3")  # fmt: skip
    assert refused.returncode == 2 and "other settings" in refused.stderr
    fleet.up = Up(fleet.config, fleet.run_dir, "--attach", environment=fleet.environment)
    fleet.until(lambda: "took over 6 running processes" in fleet.up.said())
    again = paceline("up", str(fleet.config), "--run-dir", str(fleet.run_dir), "--attach")
    assert again.returncode == 2 and "in use" in again.stderr
    fleet.steps(3)
    assert fleet.pids() == before
    assert_no_worker_noticed(fleet, at, before)
    # The new supervisor does what the old one did.
    fleet.send("rollout-0")
    _, event, _ = fleet.first(died("rollout-0"), at)
    assert event["how"] == "exit"
    fleet.until(lambda: fleet.pids()["rollout-0"] != before["rollout-0"])


def test_at_the_end_it_stops_as_if_nothing_had_happened(fleet: LaunchedFleet) -> None:
    fleet.up.process.send_signal(signal.SIGINT)
    assert fleet.up.wait(90) == 130, fleet.up.said()
    fleet.up.assert_sound("interrupted")
    fleet.up.command("ledger", "verify")
