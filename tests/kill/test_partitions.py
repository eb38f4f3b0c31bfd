"""A real fleet on hosts of its own, each in a network namespace: any two of them lose each other."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from controller.verify import verify
from paceline.ports import free_ports
from paceline.redis_server import find_server
from tests.helpers.hosts import HUB, Hosts, why_not
from tests.helpers.local_run import ROOT, paceline, write_run

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]
WORKERS = {
    "policy-0": "policy",
    "policy-1": "policy",
    "rollout-0": "rollout",
    "rollout-1": "rollout",
}


class Cluster:
    """Redis and two controllers on this machine, each worker on a host of its own."""

    def __init__(self, where: Path) -> None:
        self.hosts = Hosts(*WORKERS)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._out = (where / "out").open("ab")
        self.log = where / "out"
        self._start(where)

    def _start(self, where: Path) -> None:
        address = self.hosts.address[HUB]
        redis_port, *ports = free_ports(address, 3)
        token = where / "token"
        token.write_text("a-token-of-this-test-alone\n")
        token.chmod(0o600)
        self.url = f"redis://:secret@{address}:{redis_port}/0"
        config = write_run(
            where,
            train={"steps": 100_000, "checkpoint_every": 20, "eval_every": 100_000},
            controller={"host": address},
            auth={"token_file": str(token)},
            redis={"url": self.url},
            fleet={"provider": "none"},
        )
        self.controllers = ",".join(f"{address}:{port}" for port in ports)
        self._target = ("--controllers", self.controllers, "--token-file", str(token))
        common = [str(config), "--controllers", self.controllers, "--run-dir", str(where / "run")]
        self._run(
            [
                *(str(find_server()), "--port", str(redis_port), "--bind", address),
                *("--requirepass", "secret", "--save", "", "--dir", str(where)),
            ]
        )
        me = [sys.executable, "-m", "paceline"]
        for index in ("0", "1"):
            self._run([*me, "controller", *common, "--index", index])
        for name, role in WORKERS.items():
            self._run(self.hosts.on(name, [*me, role, *common, "--id", name]))

    def _run(self, command: list[str]) -> None:
        self._processes.append(
            subprocess.Popen(command, stdout=self._out, stderr=self._out, cwd=ROOT)
        )

    def status(self) -> dict[str, Any]:
        shown = paceline("status", "--json", *self._target)
        found: dict[str, Any] = json.loads(shown.stdout) if shown.returncode == 0 else {}
        return found

    def worker(self, name: str) -> dict[str, Any]:
        return next((w for w in self.status().get("workers", []) if w["worker_id"] == name), {})

    def until(self, true: Callable[[], object], limit_s: float = 90.0) -> None:
        deadline = time.monotonic() + limit_s
        while not true():
            assert time.monotonic() < deadline, f"{self.status()}\n{self.log.read_text()[-6000:]}"
            time.sleep(0.3)

    def goes_on(self, steps: int = 5) -> None:
        first = int(self.status().get("step", 0))
        self.until(lambda: int(self.status().get("step", 0)) >= first + steps)

    def stands_still(self) -> bool:
        before = self.status().get("step")
        time.sleep(3.0)
        return bool(self.status().get("step") == before)

    def all_well(self) -> bool:
        """Everybody is at work, on weights that the run still counts as fresh."""
        status = self.status()
        fresh = int(status.get("version", 0)) - 2
        workers = {w["worker_id"]: w for w in status.get("workers", [])}
        return workers.keys() == WORKERS.keys() and all(
            w["state"] == "running" and int(w.get("version", 0)) >= fresh for w in workers.values()
        )

    def stop(self) -> None:
        paceline("stop", *self._target)
        self.until(lambda: self.status().get("phase") == "finished")

    def close(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._out.close()
        self.hosts.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_any_two_roles_lose_each_other_and_nothing_is_lost(cluster: Cluster) -> None:
    hosts = cluster.hosts
    cluster.until(lambda: int(cluster.status().get("step", 0)) >= 3, 180.0)

    # Weights: the engine that cannot be reached falls behind, the run does not wait for it.
    for policy in ("policy-0", "policy-1"):
        hosts.part(policy, "rollout-1")
    cluster.goes_on(10)
    for policy in ("policy-0", "policy-1"):
        hosts.heal(policy, "rollout-1")
    cluster.until(cluster.all_well)

    # A rollout worker and the controllers: its tasks go to others.
    hosts.part("rollout-0", HUB)
    cluster.until(lambda: cluster.worker("rollout-0").get("state") == "dead")
    cluster.goes_on()
    hosts.heal("rollout-0", HUB)
    cluster.until(cluster.all_well)

    # A replica and the controllers: the step goes on without it.
    hosts.part("policy-1", HUB)
    cluster.until(lambda: cluster.worker("policy-1").get("state") == "dead")
    cluster.goes_on()
    hosts.heal("policy-1", HUB)
    cluster.until(cluster.all_well)

    # Two replicas that both hold the state: neither is dead, and the run waits for the network.
    hosts.part("policy-0", "policy-1")
    cluster.until(cluster.stands_still)
    hosts.heal("policy-0", "policy-1")
    cluster.goes_on()
    cluster.until(cluster.all_well)

    cluster.stop()
    report = verify(cluster.url, "tiny")
    assert report.ok, report.problems
    assert report.counts["lost"] == report.counts["duplicates"] == 0
