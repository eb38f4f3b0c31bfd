"""A real fleet whose payload store is slow, is cut off, and dies."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from paceline.rpc.ports import free_ports
from testbed.faults.tcp_proxy import TcpProxy
from testbed.fleets.launched_fleet import LaunchedFleet
from testbed.redis.external_redis import Server

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(400)]


def test_a_payload_store_that_is_slow_or_away_slows_a_fleet_and_ends_no_worker(
    tmp_path: Path,
) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    server = Server(tmp_path, "payloads", port, "appendonly yes", 'save ""')
    try:
        with TcpProxy(("127.0.0.1", port)) as proxy:
            fleet = LaunchedFleet(
                tmp_path,
                payloads={"url": f"redis://{proxy.address}/0"},
                reward={"functions": ["testbed.rewards.slow_reward:digit_first_later"]},
                fleet={"policy": 2, "rollout": 1},
            )
            try:
                fleet.settled()
                pids = fleet.pids()
                # Each answer takes longer than a heartbeat.
                proxy.delay_s, proxy.bytes_per_s = 1.1, 20_000.0
                fleet.steps(2, 180.0)
                proxy.delay_s = proxy.bytes_per_s = 0.0
                proxy.partition()
                fleet.mark()
                committed = count_of(fleet)
                time.sleep(2.0)  # nothing is to happen: there is no event to wait for
                fleet.mark()
                assert count_of(fleet) <= committed + 1, "the step whose payloads were read"
                proxy.heal()
                fleet.steps(2)
                server.kill()
                server.start()
                fleet.steps(2)
                assert fleet.pids() == pids, "no process was started again"
                counts = fleet.assert_sound()
                assert counts["dropped"] == {}
            finally:
                fleet.close()
    finally:
        server.kill()


def count_of(fleet: LaunchedFleet) -> int:
    """Steps that are committed in the journal as it was read last."""
    return sum(event["type"] == "StepCommitted" for _, event in fleet.tail.events)
