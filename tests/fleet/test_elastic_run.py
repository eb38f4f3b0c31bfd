"""A run whose fleet grows and shrinks while it goes on."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.fleets.local_run import Up, paceline, write_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

Start = Callable[..., Up]
GROUPS, GROUP_SIZE = 4, 4


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    running: list[Up] = []

    def begin(**sections: dict) -> Up:
        running.append(Up(write_run(tmp_path, **sections), tmp_path / "run"))
        return running[-1]

    yield begin
    for up in running:
        up.close()


def mesh(up: Up) -> list[str]:
    """Members of the newest mesh epoch."""
    formed = up.events("MeshFormed")
    return [m["worker_id"] for m in formed[-1]["members"]] if formed else []


def said(up: Up, *command: str) -> str:
    done = paceline(*command, "--run-dir", str(up.run_dir))
    assert done.returncode == 0, done.stderr + up.said()
    return done.stdout


def end(up: Up) -> None:
    """After the open step, with a checkpoint."""
    said(up, "stop")
    assert up.wait() == 0, up.said()


def serves(up: Up, worker_id: str) -> bool:
    """Whether a rollout worker has been given tasks."""
    here = {w["worker_id"]: w for w in up.status()["workers"]}
    return worker_id in here and here[worker_id].get("held_leases", 0) > 0


def journal(up: Up) -> dict[str, list[dict[str, Any]]]:
    """Every event so far, by type, votes and leases included."""
    found = defaultdict(list)
    for line in said(up, "events", "--all", "--json").splitlines():
        event = json.loads(line)
        found[event["type"]].append(event)
    return found


def assert_no_step_noticed(events: dict[str, list[dict[str, Any]]]) -> None:
    """Whatever the fleet was: the same batch and rate in each step, the same bits on each
    replica."""
    committed = {event["step"] for event in events["StepCommitted"]}
    digests: dict[int, set[str]] = defaultdict(set)
    voters: dict[int, set[str]] = defaultdict(set)
    for vote in events["VoteCast"]:
        digests[vote["step"]].add(vote["digest"])
        voters[vote["step"]].add(vote["worker_id"])
    assert all(len(found) == 1 for found in digests.values()), digests
    assert {len(voters[step]) for step in committed} == {1, 2}
    # Replicas that stood still would agree, too.
    assert len({next(iter(found)) for found in digests.values()}) > len(committed) / 2
    assert {len(step["groups"]) for step in events["StepOpened"]} == {GROUPS}
    metrics = [event["metrics"] for event in events["StepCommitted"]]
    assert {row["samples"] for row in metrics} == {GROUPS * GROUP_SIZE}
    assert len({row["lr"] for row in metrics}) == 1
    assert not events["RolledBack"]
    assert not events["WorkerDied"], "a worker was lost where it should have left"


@pytest.mark.long
def test_a_replica_joins_and_leaves_and_no_step_notices(start: Start) -> None:
    """1, 2 and 1 replicas."""
    up = start(
        train={"steps": 5000, "checkpoint_every": 1000, "eval_every": 5000},
        # Steps that nobody waits for must not slow the newcomer's start down.
        reward={"functions": ["testbed.rewards:digit_first_later"]},
        fleet={"controllers": 1, "policy": 1, "rollout": 1, "policy_max": 2},
    )
    up.until(lambda: up.step() >= 1)
    said(up, "scale", "policy=2")
    up.until(lambda: len(mesh(up)) == 2)
    joined = up.step()
    up.until(lambda: up.step() >= joined + 2)
    said(up, "scale", "policy=1")
    up.until(lambda: len(mesh(up)) == 1)
    left = up.step()
    up.until(lambda: up.step() >= left + 2)
    events = journal(up)
    end(up)
    assert_no_step_noticed(events)
    summary = up.summary()
    assert summary["samples_lost"] == summary["samples_duplicated"] == 0
    assert summary["ledger_ok"] is True, summary["ledger_problems"]
    assert up.alive() == []


@pytest.mark.slow
def test_an_autoscaled_run_gets_the_rollout_worker_its_trainer_waits_for(start: Start) -> None:
    up = start(
        # Without tasks in advance each step waits for the slow reward.
        train={"steps": 5000, "max_staleness": 0, "checkpoint_every": 1000, "eval_every": 5000},
        rollout={"max_sequences": 4},
        fleet={
            "policy": 1,
            "policy_max": 1,
            "rollout": 1,
            "rollout_max": 2,
            "autoscale": True,
            "autoscale_steps": 3,
            "autoscale_patience": 2,
        },
    )
    up.until(lambda: up.events("Scaled"))
    (scaled,) = up.events("Scaled")
    assert scaled["desired"] == {"policy": 1, "rollout": 2}
    assert scaled["request_id"].startswith("autoscale-step")
    up.until(lambda: serves(up, "rollout-1"))
    # Two are all it may have: it asks for no third, whatever it measures.
    after = up.step()
    up.until(lambda: up.step() >= after + 12)
    assert len(up.events("Scaled")) == 1
    end(up)
    assert up.summary()["ledger_ok"] is True
