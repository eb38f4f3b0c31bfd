"""A job of several nodes on one machine: each is a process of ``paceline node`` with the
environment of a PyTorchJob."""

import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.errors import BadInput
from paceline.observe.fleet_file import FleetRecord, ProcessId
from paceline.rpc.addresses import free_ports
from paceline.rpc.client import ControlPlane, ControlPlaneUnavailable
from paceline.v1 import admin_pb2
from paceline_launcher.cli.common import Target
from testbed.faults.network_namespaces import Hosts
from testbed.fleets.local_run import Commands


class NodeProcesses(Commands):
    """Runs ``where/run.toml`` in ``where/run``."""

    def __init__(
        self,
        where: Path,
        nodes: int,
        master: str = "127.0.0.1",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """``environment``: more variables of every node."""
        super().__init__(where / "run")
        self.where = where
        self._more = dict(environment or {})
        self._nodes, self._master = nodes, master
        # Controllers take the ports from this one on, then Redis.
        (self._port,) = free_ports("", 1)

    def start(self, rank: int, *options: str) -> None:
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self._nodes),
            "MASTER_ADDR": self._master,
            "MASTER_PORT": str(self._port),
        }
        command = [sys.executable, "-m", "paceline_launcher", "node", str(self.where / "run.toml")]
        command += ["--run-dir", str(self.run_dir), *options]
        self.launch(f"node-{rank}", self.on(rank, command), os.environ | self._more | environment)

    def on(self, rank: int, command: Sequence[str]) -> list[str]:
        """The command, as it is started on that node."""
        return list(command)

    def wait(self, rank: int, limit_s: float = 240.0) -> int:
        """Exit status of the node."""
        return self.ended(f"node-{rank}", limit_s)

    def send(self, rank: int, number: signal.Signals) -> None:
        """To the command itself."""
        self.started[f"node-{rank}"].send_signal(number)

    def kill_all_of(self, rank: int) -> None:
        """The node loses power: the command and every process that it started."""
        self.started[f"node-{rank}"].kill()
        self.started[f"node-{rank}"].wait()
        for one in self._started_by(rank):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)

    def has_leader(self) -> bool:
        return self._status() is not None

    def running_workers(self) -> set[str]:
        """Workers that the leader sees at work; empty while there is no leader."""
        status = self._status()
        found = status.workers if status is not None else ()
        return {w.worker_id for w in found if w.state == "running"}

    def workers_of(self, rank: int) -> set[str]:
        record = self._record(rank)
        return {p.name for p in record.processes if p.role != "controller"} if record else set()

    def pid(self, rank: int, name: str) -> int:
        """Process id of the newest process of that name."""
        record = self._record(rank)
        assert record is not None
        return next(p for p in record.processes if p.name == name).ids[-1].pid

    def homes(self) -> list[Path]:
        return [self._home(rank) for rank in range(self._nodes)]

    def _started_by(self, rank: int) -> list[ProcessId]:
        record = self._record(rank)
        if record is None:
            return []
        return [*record.survivors(), *(one for one in record.redis if one.alive())]

    def _status(self) -> admin_pb2.StatusReply | None:
        """Status, asked in this process: polls that start a command each would take a core from
        the run."""

        async def ask(control: ControlPlane) -> admin_pb2.StatusReply:
            request = admin_pb2.StatusRequest()
            reply: admin_pb2.StatusReply = await control.call(
                "AdminService.GetStatus", request, timeout_s=5.0
            )
            return reply

        try:
            return Target(run_dir=self.run_dir).ask(ask)
        except (BadInput, ControlPlaneUnavailable):
            return None

    def _record(self, rank: int) -> FleetRecord | None:
        return FleetRecord.read(self._home(rank))

    def _home(self, rank: int) -> Path:
        return self.run_dir if rank == 0 else self.run_dir / "nodes" / f"node-{rank}"


class NamespacedNodes(NodeProcesses):
    """Each node is a host of its own; needs root."""

    def __init__(
        self, where: Path, nodes: int, environment: Mapping[str, str] | None = None
    ) -> None:
        self.hosts = Hosts(*(f"node{rank}" for rank in range(nodes)))
        super().__init__(where, nodes, self.hosts.address["node0"], environment)

    def on(self, rank: int, command: Sequence[str]) -> list[str]:
        return self.hosts.on(f"node{rank}", command)

    def close(self) -> None:
        super().close()
        self.hosts.close()
