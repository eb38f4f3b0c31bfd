"""A payload store of its own under real workers: slow, then cut off. The run goes on, or the store is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.groups.payload import decode
from paceline.rpc.ports import free_ports
from testbed.faults.tcp_proxy import TcpProxy
from testbed.fleets.launched_fleet import LaunchedFleet
from testbed.fleets.local_run import paceline
from testbed.redis.external_redis import Server

pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.timeout(400)]


def test_a_slow_store_slows_a_fleet_and_one_that_is_cut_off_is_named(tmp_path: Path) -> None:
    """Replicas of two ranks, of which each reads its own rows."""
    (port,) = free_ports("127.0.0.1", 1)
    server = Server(tmp_path, "payloads", port, "appendonly yes", 'save ""')
    with TcpProxy(("127.0.0.1", port)) as proxy:
        url = f"redis://{proxy.address}/0"
        fleet = LaunchedFleet(
            tmp_path / "fleet",
            payloads={"url": url},
            fleet={"controllers": 1, "policy": 1, "policy_ranks": 2, "rollout": 1},
        )
        try:
            fleet.settled(120.0)
            at = fleet.mark()
            proxy.delay_s, proxy.bytes_per_s = 0.4, 20_000.0
            fleet.steps(2, limit_s=120.0)
            proxy.partition()

            def named() -> bool:
                done = paceline("why", "--run-dir", str(fleet.run_dir), "--json")
                answers = json.loads(done.stdout)["answers"] if done.stdout else []
                return any(url in str(each["sentence"]) for each in answers if each["leads"])

            fleet.until(named, 120.0)
            proxy.delay_s = proxy.bytes_per_s = 0.0
            proxy.heal()
            fleet.steps(3, limit_s=120.0)
            events = [e for _, e in fleet.tail.events[at:]]
            assert not [e for e in events if e["type"] in ("WorkerDied", "TaskDropped")]
            kept = [server.client.get(key) for key in server.client.scan_iter("*:payload:*")]
            stored = [decode(payload) for payload in kept if payload is not None]
            assert stored and not any(c.text for group in stored for c in group.completions)
            shown = paceline("samples", "--run-dir", str(fleet.run_dir), "--json")
            groups = json.loads(shown.stdout)["groups"]
            assert any(c["text"] for group in groups for c in group["completions"])
        finally:
            fleet.close()
            server.kill()
