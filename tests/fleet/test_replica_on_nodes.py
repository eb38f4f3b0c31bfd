"""One policy replica whose ranks are on two nodes of a job, each a process of `paceline node`.

The nodes are told of two GPUs each. There are none, so the ranks compute on the CPU.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.fleets.local_run import write_run
from testbed.fleets.node_job import NodeProcesses

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(600)]

TWO_GPUS = {"CUDA_VISIBLE_DEVICES": "0,1"}
SLOWLY = {"functions": ["testbed.rewards:digit_first_later"]}


@pytest.fixture
def job(tmp_path: Path) -> Iterator[NodeProcesses]:
    made = NodeProcesses(tmp_path, nodes=2, environment=TWO_GPUS)
    try:
        yield made
    finally:
        made.close()


def write_spread_run(where: Path, steps: int) -> None:
    write_run(
        where,
        model={"device": "auto"},
        reward=SLOWLY,
        train={"steps": steps, "checkpoint_every": 10},
        fleet={"controllers": 1, "policy": 1, "policy_ranks": 3, "rollout": 1},
    )


def assert_sound(job: NodeProcesses, steps: int) -> None:
    summary = job.summary()
    assert summary["status"] == "finished", job.said()
    assert summary["steps"] == steps
    assert summary["samples_lost"] == summary["samples_duplicated"] == 0
    assert summary["ledger_ok"] is True, summary["ledger_problems"]
    assert (Path(summary["export"]) / "config.json").is_file()
    assert job.alive() == []


# In every run: test_replica_on_hosts.py, and the nodes' part in test_node_fleet.py.
@pytest.mark.slow
@pytest.mark.parametrize(("node", "victim"), [(1, "policy-0.2"), (0, "policy-0")])
def test_a_replica_on_two_nodes_comes_back_after_the_death_of_a_rank_on_either(
    job: NodeProcesses, tmp_path: Path, node: int, victim: str
) -> None:
    write_spread_run(tmp_path, steps=20)
    job.start(1)
    job.start(0)
    job.until(job.has_leader)
    job.steps(2)
    assert job.workers_of(0) == {"policy-0", "policy-0.1"}
    assert job.workers_of(1) == {"policy-0.2", "rollout-0"}

    before = {(n, one): job.pid(n, one) for n in (0, 1) for one in job.workers_of(n)}
    os.kill(job.pid(node, victim), signal.SIGKILL)
    # All three are others then: a replica lives and dies as one.
    job.until(
        lambda: all(
            job.pid(n, one) != pid for (n, one), pid in before.items() if one != "rollout-0"
        )
    )
    job.steps(2)

    assert [job.wait(0), job.wait(1)] == [0, 0], job.said()
    assert_sound(job, 20)
