"""Any two roles lose each other, on a real fleet whose processes have a host each."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from testbed.faults.network_namespaces import HUB, why_not
from testbed.fleets.fleet import Event
from testbed.fleets.namespaced_fleet import CONTROLLERS, NamespacedFleet

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[NamespacedFleet]:
    made = NamespacedFleet(tmp_path)
    try:
        yield made
    finally:
        made.close()


def died(worker_id: str) -> Callable[[Event], bool]:
    return lambda e: e["type"] == "WorkerDied" and e["worker_id"] == worker_id


def succeeded(event: Event) -> bool:
    return bool(event["type"] == "TermBegun")


def test_any_two_roles_lose_each_other_and_nothing_is_lost(cluster: NamespacedFleet) -> None:
    cluster.settled(180.0)

    # Weights: the engine that cannot be reached falls behind, the run does not wait for it.
    cluster.part("rollout-1", "policy-0", "policy-1")
    cluster.steps(10)
    cluster.heal("rollout-1", "policy-0", "policy-1")
    cluster.settled()

    # A rollout worker and the controllers: its tasks go to others.
    # A replica and the controllers: the step goes on without it.
    for worker in ("rollout-0", "policy-1"):
        at = cluster.mark()
        cluster.part(worker, *CONTROLLERS)
        cluster.first(died(worker), at)
        cluster.steps(5)
        cluster.heal(worker, *CONTROLLERS)
        cluster.settled()

    # The leader and Redis, but not the leader and its workers: the standby succeeds it.
    at, leader = cluster.mark(), cluster.status().leader
    cluster.part(leader, HUB)
    _, term, at = cluster.first(succeeded, at)
    assert term["controller_id"] != leader
    cluster.steps(5)
    cluster.heal(leader, HUB)
    cluster.settled()
    assert not [e for _, e in cluster.tail.events[at:] if e["type"] in ("TermBegun", "WorkerDied")]

    # Two replicas that both hold the state: neither is dead, and the run waits for the network.
    cluster.part("policy-0", "policy-1")
    cluster.until(lambda: stands_still(cluster))
    cluster.heal("policy-0", "policy-1")
    cluster.settled()

    cluster.stop()
    cluster.until(lambda: cluster.phase() == "finished")
    cluster.assert_sound()


def stands_still(cluster: NamespacedFleet) -> bool:
    before = cluster.status().step
    time.sleep(3.0)
    return bool(cluster.status().step == before)
