"""A fleet of one network namespace a process, for partitions; Redis is at the hub."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from paceline.redis.server import find_server
from paceline.rpc.addresses import free_ports
from paceline.rpc.client import ControlPlane, ControlPlaneUnavailable
from testbed.faults.network_namespaces import HUB, Hosts
from testbed.fleets.fleet import Fleet
from testbed.fleets.local_run import ROOT, paceline, write_run

CONTROLLERS = ("controller-0", "controller-1")
WORKERS = {
    "policy-0": "policy",
    "policy-1": "policy",
    "rollout-0": "rollout",
    "rollout-1": "rollout",
}
PORT = 7000
TOKEN = "a-token-of-this-test-alone"


class NamespacedFleet(Fleet):
    """Controllers and workers, started by hand, each on a host of its own; needs root."""

    controllers: tuple[str, ...] = CONTROLLERS
    workers_by_role: ClassVar[Mapping[str, str]] = WORKERS
    more_hosts: tuple[str, ...] = ()

    def __init__(self, where: Path) -> None:
        super().__init__()
        self.hosts = Hosts(*self.controllers, *self.workers_by_role, *self.more_hosts)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._log = where / "out"
        self._out = self._log.open("ab")
        try:
            self._start(where)
        except BaseException:
            self.close()
            raise

    def _start(self, where: Path) -> None:
        hub = self.hosts.address[HUB]
        (redis_port,) = free_ports(hub, 1)
        token = where / "token"
        token.write_text(f"{TOKEN}\n")
        token.chmod(0o600)
        self._url = f"redis://:secret@{hub}:{redis_port}/0"
        config = self.write_config(
            where,
            controller={"host": "0.0.0.0"},
            auth={"token_file": str(token)},
            redis={"url": self._url},
        )
        self._addresses = [f"{self.hosts.address[name]}:{PORT}" for name in self.controllers]
        controllers = ",".join(self._addresses)
        self._target = ("--controllers", controllers, "--token-file", str(token))
        self._common = [str(config), "--controllers", controllers, "--run-dir", str(where / "run")]
        self._run(
            [
                *(str(find_server()), "--port", str(redis_port), "--bind", hub),
                *("--requirepass", "secret", "--save", "", "--dir", str(where)),
            ]
        )
        for index, name in enumerate(self.controllers):
            self._run(self.hosts.on(name, self.command("controller", "--index", str(index))))
        for name, role in self.workers_by_role.items():
            self._run(self.hosts.on(name, self.command(role, "--id", name)))

    def write_config(self, where: Path, **sections: Any) -> Path:
        return write_run(
            where,
            train={"steps": 1_000_000, "checkpoint_every": 20, "eval_every": 1_000_000},
            fleet={"provider": "none"},
            **sections,
        )

    def command(self, role: str, *options: str) -> list[str]:
        """Command of one process of ``role``."""
        return [sys.executable, "-m", "paceline_launcher", role, *self._common, *options]

    def _run(self, command: list[str]) -> None:
        self._processes.append(
            subprocess.Popen(command, stdout=self._out, stderr=self._out, cwd=ROOT)
        )

    @property
    def url(self) -> str:
        return self._url

    def control_plane(self) -> ControlPlane:
        return ControlPlane(self._addresses, token=TOKEN)

    def check(self) -> None:
        ended = [p.args for p in self._processes if p.poll() is not None]
        assert not ended, f"{ended}\n{self.said()}"

    def said(self) -> str:
        return self._log.read_text(errors="replace")[-6000:]

    def part(self, name: str, *others: str) -> None:
        for other in others:
            self.hosts.part(name, other)

    def heal(self, name: str, *others: str) -> None:
        for other in others:
            self.hosts.heal(name, other)

    def settled(self, limit_s: float = 90.0) -> None:
        """Everybody is at work, on weights that the run still counts as fresh."""
        self.until(self._is_settled, limit_s)
        self.steps(1)

    def _is_settled(self) -> bool:
        try:
            status = self.status(timeout_s=2.0)
        except ControlPlaneUnavailable:
            return False
        workers = {w.worker_id: w for w in status.workers if w.state != "dead"}
        return (
            workers.keys() == self.workers_by_role.keys()
            and {c.controller_id for c in status.controllers if c.state != "silent"}
            == set(self.controllers)
            and all(w.state == "running" for w in workers.values())
            and all(w.version >= max(0, status.version - 2) for w in workers.values())
            and all(
                w.mesh_epoch == status.mesh_epoch
                for w in workers.values()
                if self.workers_by_role[w.worker_id] == "policy"
            )
        )

    def stop(self) -> None:
        """Ends the run as a user does; its processes go by themselves."""
        paceline("stop", *self._target)

    def phase(self) -> str:
        return self.status().phase

    def close(self) -> None:
        super().close()
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._out.close()
        self.hosts.close()
