"""One run on two nodes: two processes of `paceline node`, with the environment that a PyTorchJob
sets."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.faults.network_namespaces import why_not
from testbed.fleets.local_run import write_run
from testbed.fleets.node_job import NamespacedNodes, NodeProcesses

WHY_NOT = why_not()
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SLOWLY = {"functions": ["testbed.rewards:digit_first_later"]}
"""Some two steps a second: what a test does to the run comes before its end."""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[NodeProcesses]:
    made = NodeProcesses(tmp_path, nodes=2)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[NamespacedNodes]:
    made = NamespacedNodes(tmp_path, nodes=2)
    try:
        yield made
    finally:
        made.close()


def set_out_together(job: NodeProcesses, everyone: set[str]) -> None:
    """Holds the run until every worker is there: on a busy machine the first two would finish
    it."""
    job.until(job.has_leader)
    job.command("pause")
    job.until(lambda: job.running_workers() == everyone)
    job.command("resume")


def assert_sound(job: NodeProcesses, steps: int) -> None:
    """The run finished, every sample is accounted for, the model is exported, and nothing is left
    running."""
    summary = job.summary()
    assert summary["status"] == "finished", job.said()
    assert summary["steps"] == steps
    assert summary["samples_lost"] == summary["samples_duplicated"] == 0
    assert summary["ledger_ok"] is True, summary["ledger_problems"]
    assert summary["samples_trained"] == steps * 4 * 4
    assert (Path(summary["export"]) / "config.json").is_file()
    assert job.alive() == []


@pytest.mark.long
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_a_run_on_two_hosts_goes_on_after_the_loss_of_either(
    hosts: NamespacedNodes, tmp_path: Path
) -> None:
    everyone = {"policy-0", "policy-1", "rollout-0"}
    write_run(
        tmp_path,
        reward=SLOWLY,
        train={"steps": 40, "checkpoint_every": 10},
        fleet={"rollout": 1},
    )
    hosts.start(0)
    hosts.start(1)
    set_out_together(hosts, everyone)
    others = {name: hosts.pid(1, name) for name in hosts.workers_of(1)}
    hosts.steps(2)

    hosts.kill_all_of(0)
    hosts.start(0)
    hosts.steps(2)
    assert "waiting for node 0" in hosts.said(1)
    # They waited for node 0 and went on with it.
    assert {name: hosts.pid(1, name) for name in others} == others

    hosts.kill_all_of(1)
    hosts.steps(2)
    # Else the run would end before the node is back.
    hosts.command("pause")
    hosts.start(1)
    hosts.until(lambda: hosts.running_workers() == everyone)
    hosts.command("resume")

    assert [hosts.wait(0), hosts.wait(1)] == [0, 0], hosts.said()
    assert_sound(hosts, 40)


# In every run: the loss of either host, above, and tests/process/cli/test_node_fleet.py.
@pytest.mark.slow
def test_a_stopped_job_ends_on_every_node_and_a_stopped_node_leaves_it(
    job: NodeProcesses, tmp_path: Path
) -> None:
    everyone = {"policy-0", "rollout-0", "rollout-1"}
    write_run(
        tmp_path,
        reward=SLOWLY,
        train={"steps": 1_000_000, "checkpoint_every": 10},
        fleet={"policy": 1},
    )
    job.start(0)
    job.start(1)
    job.until(lambda: job.running_workers() == everyone)

    # The cluster takes node 1 away; its workers hand back what they hold.
    job.send(1, signal.SIGTERM)
    assert job.wait(1) == 130
    assert job.running_workers() == {"policy-0", "rollout-1"}
    job.steps(2)
    job.start(1)
    job.until(lambda: job.running_workers() == everyone)

    # It ends the job: every node gets the signal, node 1 first.
    job.send(1, signal.SIGTERM)
    job.send(0, signal.SIGTERM)
    assert [job.wait(0), job.wait(1)] == [130, 130], job.said()
    summary = job.summary()
    assert summary["status"] == "interrupted"
    assert summary["checkpoint_step"] == summary["steps"]
    assert job.alive() == []
