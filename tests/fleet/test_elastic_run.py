"""A run whose fleet grows and shrinks while it goes on."""

import json
from collections import defaultdict
from typing import Any

import pytest

from testbed.fleets.local_run import Up
from tests.fleet.conftest import Start

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

GROUPS, GROUP_SIZE = 4, 4


def mesh(up: Up) -> list[str]:
    """Members of the newest mesh epoch."""
    formed = up.events("MeshFormed")
    return [m["worker_id"] for m in formed[-1]["members"]] if formed else []


def journal(up: Up) -> dict[str, list[dict[str, Any]]]:
    """Every event so far, by type, votes and leases included."""
    found = defaultdict(list)
    for line in up.command("events", "--all", "--json").splitlines():
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
    up.command("scale", "policy=2")
    up.until(lambda: len(mesh(up)) == 2)
    joined = up.step()
    up.until(lambda: up.step() >= joined + 2)
    up.command("scale", "policy=1")
    up.until(lambda: len(mesh(up)) == 1)
    left = up.step()
    up.until(lambda: up.step() >= left + 2)
    events = journal(up)
    up.command("stop")
    assert up.wait() == 0, up.said()
    assert_no_step_noticed(events)
    up.assert_sound()
