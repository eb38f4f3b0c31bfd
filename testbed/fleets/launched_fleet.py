"""A fleet under ``paceline up``, with signals and failpoints to inject faults."""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.observe.fleet_file import FleetRecord, ProcessId
from paceline.redis.users import CONTROLLER, user_url
from paceline.rpc.auth import own_token
from paceline.rpc.client import ControlPlane, ControlPlaneUnavailable
from testbed.faults import failpoints
from testbed.fleets.fleet import Event, Fleet
from testbed.fleets.local_run import Up, write_run

__all__ = ["Event", "LaunchedFleet"]


def _counts(fleet: Mapping[str, Any]) -> dict[str, int]:
    return {k: int(v) for k, v in fleet.items() if k in ("controllers", "policy", "rollout")}


class LaunchedFleet(Fleet):
    """``paceline up`` of a small model until ``close``. ``redis_url``: not the embedded Redis."""

    def __init__(self, where: Path, *, redis_url: str = "", **sections: Any) -> None:
        super().__init__()
        self._redis_url = redis_url
        if redis_url:
            sections["redis"] = {"url": redis_url}
        else:
            sections.setdefault("redis", {"maxmemory_mb": 128})  # so that it can be filled
        train = {
            "steps": 1_000_000,
            "checkpoint_every": 10,
            "eval_every": 1_000_000,
            # Every step passes every instant, also once all there is to learn is learned.
            "skip_zero_advantage": False,
            **sections.pop("train", {}),
        }
        fleet = {"max_restarts": 1000, **sections.pop("fleet", {})}
        self.expected = sum(
            {"controllers": 2, "policy": 2, "rollout": 2, **_counts(fleet)}.values()
        )
        self.config = write_run(where, train=train, fleet=fleet, **sections)
        self.armed = where / "armed"
        self.run_dir = where / "run"
        self.environment = failpoints.environment(self.armed)
        self.up = Up(self.config, self.run_dir, environment=self.environment)

    # -- looking ------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        if self._redis_url:
            return self._redis_url
        return user_url(self.run_dir / "redis", CONTROLLER)

    def control_plane(self) -> ControlPlane:
        where = [p.address for p in self.record().processes if p.address]
        return ControlPlane(where, token=own_token(self.run_dir))

    def check(self) -> None:
        assert self.up.process.poll() is None, f"the run ended:\n{self.up.said()}"

    def said(self) -> str:
        return self.up.said()

    def record(self) -> FleetRecord:
        record = FleetRecord.read(self.run_dir)
        assert record is not None
        return record

    def process(self, name: str) -> ProcessId:
        """The newest process of that name."""
        return next(p for p in self.record().processes if p.name == name).ids[-1]

    def pids(self) -> dict[str, int]:
        return {p.name: p.ids[-1].pid for p in self.record().processes if p.ids}

    # -- waiting ------------------------------------------------------------------------------

    def settled(self, limit_s: float = 90.0) -> None:
        """Every worker is there, all replicas are in the mesh, every engine serves."""
        self.until(self._is_settled, limit_s)
        self.steps(1)

    def _is_settled(self) -> bool:
        record = FleetRecord.read(self.run_dir)
        if record is None or len(record.processes) < self.expected:
            return False
        if not (record.redis or self._redis_url):
            return False
        if not all(p.ids and p.ids[-1].alive() for p in record.processes):
            return False
        try:
            status = self.status(timeout_s=2.0)
        except ControlPlaneUnavailable:
            return False
        living = [w for w in status.workers if w.state == "running"]
        wanted = dict(status.desired)
        return (
            bool(wanted)
            and len({w.worker_id for w in living}) >= sum(wanted.values())
            and {c.pid for c in status.controllers if c.state != "silent"}
            >= {p.ids[-1].pid for p in record.processes if p.role == "controller"}
            and all(w.version >= 0 for w in living if not w.scorer)
            and all(
                w.mesh_epoch == status.mesh_epoch for w in living if w.worker_id[:6] == "policy"
            )
        )

    # -- faults -------------------------------------------------------------------------------

    def send(self, name: str, number: signal.Signals = signal.SIGKILL) -> float:
        """Sends it to the newest process of that name; Unix seconds."""
        identity = self.process(name)
        assert identity.alive(), f"{name} does not run"
        os.kill(identity.pid, number)
        return time.time()

    def fall(
        self,
        name: str,
        instant: str,
        number: signal.Signals = signal.SIGKILL,
        limit_s: float = 30.0,
    ) -> float:
        """The process falls the next time it comes to ``instant``; Unix seconds."""
        return failpoints.fall(self.armed, self.process(name).pid, instant, number)(limit_s)

    def starve(self, name: str, seconds: float) -> None:
        """The process gets a tenth of its time."""
        deadline = time.monotonic() + seconds
        try:
            while time.monotonic() < deadline:
                self.send(name, signal.SIGSTOP)
                time.sleep(0.9)
                self.send(name, signal.SIGCONT)
                time.sleep(0.1)
        finally:
            self.send(name, signal.SIGCONT)

    def kill_everything(self) -> None:
        """Kills as a power cut does: the launcher, all that it started, and Redis."""
        self.up.close()

    def start_again(self) -> None:
        """In the same run directory, as after a power cut."""
        self.forget()
        self.up = Up(self.config, self.run_dir, environment=self.environment)
        self.settled()

    def redis_process(self) -> ProcessId:
        return self.record().redis[-1]

    def close(self) -> None:
        super().close()
        self.up.close()
