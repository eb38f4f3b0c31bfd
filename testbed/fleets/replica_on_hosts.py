"""A fleet on recorded data with one policy replica whose ranks are on two hosts, and one of as many
ranks on a third."""

import os
import signal
import subprocess
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from paceline.rpc.client import ControlPlaneUnavailable
from paceline.v1 import admin_pb2
from testbed.fleets.local_run import ROOT, write_run
from testbed.fleets.namespaced_fleet import NamespacedFleet

LEFT, RIGHT = "left", "right"
SPREAD, WHOLE = "policy-0", "policy-1"
"""The replica on two hosts, whose rank 0 is on the left one, and the one that rank 0 has started on
a host of its own."""
MASTER_PORT = "29500"
WAIT_S = 120.0


class ReplicaOnHosts(NamespacedFleet):
    """The test starts the ranks of ``SPREAD``, as a launcher does; needs root."""

    controllers = ("controller-0",)
    workers_by_role: ClassVar = {WHOLE: "policy", "rollout-0": "rollout"}
    more_hosts = (LEFT, RIGHT)

    def __init__(self, where: Path, ranks_a_host: int) -> None:
        """``ranks_a_host``: ranks of ``SPREAD`` on each of its two hosts."""
        self._local_size = ranks_a_host
        self.spread: dict[str, list[subprocess.Popen[bytes]]] = {LEFT: [], RIGHT: []}
        super().__init__(where)

    def write_config(self, where: Path, **sections: Any) -> Path:
        path = write_run(
            where,
            data={"completion_field": "answer"},
            reward={},
            train={
                "algorithm": "sft",
                "steps": 1_000_000,
                "checkpoint_every": 50,
                "eval_every": 1_000_000,
            },
            rollout={"source": "recorded"},
            fleet={
                "provider": "none",
                "controllers": 1,
                "rollout": 1,
                "policy_ranks": 2 * self._local_size,
                # Up to nine processes with torch may share two cores.
                "lease_ttl_s": 8.0,
            },
            **sections,
        )
        path.write_text(path.read_text().replace("group_size = 4\n", ""))
        return path

    def spread_joins(self) -> None:
        """Starts ``SPREAD`` and waits until it takes part in steps."""
        # No step of recorded data waits for anything: the other replica would take the cores from
        # the ranks that start.
        self._pause(True)
        self._start_spread()
        self.until(self._is_settled, 240.0)
        self._pause(False)
        self.steps(1)

    def _pause(self, paused: bool) -> None:
        control = self.control_plane()

        async def pause() -> None:
            request = admin_pb2.PauseRequest(request_id=uuid.uuid4().hex, paused=paused)
            await control.call("AdminService.Pause", request, WAIT_S)
            await control.close()

        self._loop.run(pause())

    def _start_spread(self) -> None:
        """All ranks of the replica on two hosts."""
        size = self._local_size
        for number, host in enumerate((LEFT, RIGHT)):
            for local in range(size):
                place = {
                    "RANK": str(number * size + local),
                    "WORLD_SIZE": str(2 * size),
                    "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": str(size),
                    "MASTER_ADDR": self.hosts.address[LEFT],
                    "MASTER_PORT": MASTER_PORT,
                }
                process = subprocess.Popen(
                    self.hosts.on(host, self.command("policy", "--id", SPREAD)),
                    stdout=self._out,
                    stderr=self._out,
                    cwd=ROOT,
                    env=os.environ | place,
                )
                self.spread[host].append(process)

    def send(self, host: str, number: signal.Signals) -> None:
        """To all ranks on ``host``."""
        for process in self.spread[host]:
            process.send_signal(number)

    def spread_ends(self, *hosts: str) -> list[int]:
        """Exit statuses of the ranks there, once all have ended by themselves."""
        return [self._end_of(process) for host in hosts for process in self.spread[host]]

    def spread_is_gone(self) -> None:
        assert all(p.poll() is not None for found in self.spread.values() for p in found)
        for found in self.spread.values():
            found.clear()

    def _end_of(self, process: subprocess.Popen[bytes]) -> int:
        try:
            return process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"a rank does not end:\n{self.said()}") from None

    def _is_settled(self) -> bool:
        try:
            status = self.status(timeout_s=2.0)
        except ControlPlaneUnavailable:
            return False
        policies = [
            w for w in status.workers if w.worker_id in (SPREAD, WHOLE) and w.state == "running"
        ]
        return {w.worker_id for w in policies} == {SPREAD, WHOLE} and all(
            w.mesh_epoch == status.mesh_epoch for w in policies
        )

    def close(self) -> None:
        for process in self._spread():
            process.kill()
        for process in self._spread():
            process.wait()
        super().close()

    def _spread(self) -> Sequence[subprocess.Popen[bytes]]:
        return [p for found in self.spread.values() for p in found]
