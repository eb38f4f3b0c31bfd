"""One run on two nodes: two processes of `paceline node`, with the environment that a PyTorchJob
sets."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.faults.network_namespaces import why_not
from testbed.fleets.local_run import SLOWLY, write_run
from testbed.fleets.node_job import NamespacedNodes

WHY_NOT = why_not()
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[NamespacedNodes]:
    made = NamespacedNodes(tmp_path, nodes=2)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.long
@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
def test_a_run_on_two_hosts_goes_on_after_the_loss_of_either(
    hosts: NamespacedNodes, tmp_path: Path
) -> None:
    everyone = {"policy-0", "policy-1", "rollout-0"}
    write_run(
        tmp_path,
        reward=SLOWLY,
        train={"steps": 48, "checkpoint_every": 8},
        fleet={"rollout": 1},
    )
    hosts.start(0)
    hosts.start(1)
    # On a busy machine the first two would finish the run.
    hosts.until(hosts.has_leader)
    hosts.command("pause")
    hosts.until(lambda: hosts.running_workers() == everyone)
    hosts.command("resume")
    others = {name: hosts.pid(1, name) for name in hosts.workers_of(1)}
    hosts.steps(2)

    hosts.kill_all_of(0)
    hosts.start(0)
    hosts.steps(2)
    assert "waiting for node 0" in hosts.output_of("node-1").read_text()
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
    assert hosts.assert_sound(steps=48)["samples_trained"] == 48 * 4 * 4
