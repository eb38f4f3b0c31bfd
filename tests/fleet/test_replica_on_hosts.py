"""A policy replica on two hosts dies as one with either host, the other replica goes on, and the
replica returns."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from testbed.faults.network_namespaces import why_not
from testbed.fleets.fleet import Event
from testbed.fleets.replica_on_hosts import LEFT, RIGHT, SPREAD, ReplicaOnHosts

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
    pytest.mark.e2e,
    pytest.mark.long,
    pytest.mark.timeout(900),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ReplicaOnHosts]:
    made = ReplicaOnHosts(tmp_path, 1)
    try:
        yield made
    finally:
        made.close()


def dies(event: Event) -> bool:
    return bool(event["type"] == "WorkerDied" and event["worker_id"] == SPREAD)


@pytest.mark.slow
def test_a_replica_with_a_host_that_stands_still_dies_as_one_and_returns(
    cluster: ReplicaOnHosts,
) -> None:
    """It is the host of rank 0, and later goes on. In every run, on one host:
    tests/process/policy/test_outside_ranks.py."""
    cluster.spread_joins()
    lose(cluster, lambda: cluster.send(LEFT, signal.SIGSTOP))
    assert cluster.spread_ends(RIGHT) == [1]
    cluster.send(LEFT, signal.SIGCONT)
    assert cluster.spread_ends(LEFT) == [1]
    returns(cluster)
    cluster.assert_sound()


def test_a_replica_on_two_hosts_dies_as_one_and_returns(cluster: ReplicaOnHosts) -> None:
    """Several ranks on a host, killed too: tests/process/policy/test_outside_ranks.py."""
    cluster.spread_joins()
    # The host without rank 0 is cut off, from its replica and from everybody else.
    lose(cluster, lambda: cluster.hosts.cut(RIGHT))
    assert cluster.spread_ends(LEFT, RIGHT) == [1, 1]
    cluster.hosts.mend(RIGHT)
    returns(cluster)

    cluster.assert_sound()


def lose(cluster: ReplicaOnHosts, fault: Callable[[], object]) -> None:
    """After ``fault`` the replica is dead, and the other one commits the step and more."""
    at = cluster.mark()
    fault()
    cluster.first(dies, at, 120.0)
    cluster.steps(3, 120.0)


def returns(cluster: ReplicaOnHosts) -> None:
    """Its ranks are started again: it receives the state and takes part in steps."""
    cluster.spread_is_gone()
    cluster.spread_joins()
