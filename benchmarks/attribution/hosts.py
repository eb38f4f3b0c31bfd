"""A run on two hosts of one machine (network and host name of their own), under ``paceline node``;
needs root.

Host 0 has Redis, two controllers, a policy replica and a rollout worker, host 1 a replica and a
rollout worker.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import redis

from controller.store.journal import Journal
from controller.store.ledger_follower import LedgerFollower
from controller.store.redis_keys import Keys
from paceline.observe.faults import Faults
from paceline.observe.fleet_file import FleetRecord, ProcessId
from paceline.observe.projection import Projector
from paceline.redis.client import connect
from paceline.redis.users import CONTROLLER, user_url
from paceline.rpc.auth import own_token
from paceline.rpc.client import ControlPlane, ControlPlaneUnavailable, RequestRefused
from testbed.faults import failpoints
from testbed.fleets.fleet import RUN, Fleet
from testbed.fleets.local_run import SLOWLY, write_run
from testbed.fleets.node_job import NamespacedNodes

WORKERS = {"policy-0": 0, "rollout-0": 0, "policy-1": 1, "rollout-1": 1}
"""Their nodes."""
CONTROLLERS = ("controller-0", "controller-1")
REDIS = "redis"
ENDLESS = 1_000_000
LEASE_S = 6.0


class NamedNodes(NamespacedNodes):
    """Each node has a host name of its own: faults are counted by host."""

    def on(self, rank: int, command: Sequence[str]) -> list[str]:
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', f"node{rank}"]
        return super().on(rank, [*named, *command])


class TwoHosts(Fleet):
    def __init__(self, where: Path) -> None:
        super().__init__()
        self.armed = where / "armed"
        write_run(
            where,
            reward=SLOWLY,
            train={
                "steps": ENDLESS,
                "checkpoint_every": 10,
                "eval_every": ENDLESS,
                "algorithm": "benchmarks.attribution.paced:Paced",
            },
            fleet={"lease_ttl_s": LEASE_S, "max_restarts": ENDLESS},
        )
        self.nodes = NamedNodes(where, nodes=2)
        try:
            for rank in (0, 1):
                self.nodes.start(rank)
            self.nodes.until(lambda: self._record(1) is not None)
            self.settled()
        except BaseException:
            self.close()
            raise

    @property
    def run_dir(self) -> Path:
        return self.nodes.run_dir

    @property
    def url(self) -> str:
        return user_url(self.run_dir / "redis", CONTROLLER)

    def control_plane(self) -> ControlPlane:
        record = self._record(0)
        assert record is not None
        host = self.nodes.hosts.address["node0"]
        ports = [p.address.rpartition(":")[2] for p in record.processes if p.address]
        return ControlPlane([f"{host}:{port}" for port in ports], token=own_token(self.run_dir))

    def check(self) -> None:
        """Nothing: ends of nodes show as a fleet that does not settle, and some are scheduled."""

    def said(self) -> str:
        return self.nodes.said()

    def process(self, name: str) -> ProcessId:
        """The newest process of that name."""
        record = self._record(WORKERS.get(name, 0))
        assert record is not None
        if name == REDIS:
            return record.redis[-1]
        return next(p for p in record.processes if p.name == name).ids[-1]

    def leader(self) -> str:
        status = self.status()
        return str(next(c.controller_id for c in status.controllers if c.state == "leader"))

    def faults(self, limit_s: float = 0.0) -> Faults:
        """The faults that the journal tells of. ``limit_s``: how long Redis may be away."""

        async def load() -> Faults:
            client, projector = connect(self.url), Projector(Path(), inline=True)
            try:
                await LedgerFollower.load(Journal(client, Keys(RUN)), projector)
                return await projector.ask(lambda run: run.totals.faults)
            finally:
                await client.aclose()

        deadline = time.monotonic() + limit_s
        while True:
            try:
                return asyncio.run(load())
            except (redis.RedisError, OSError):
                if time.monotonic() >= deadline:
                    raise
                # Redis is being started again: there is no event to await.
                time.sleep(0.5)

    def calm(self, seconds: float) -> None:
        """Leaves it alone for so long; what it journals meanwhile is read."""
        end = time.monotonic() + seconds
        while (left_s := end - time.monotonic()) > 0:
            self.tail.read(min(1.0, left_s))

    def settled(self, limit_s: float = 600.0) -> None:
        """Every process is there and at work, and commits follow one another."""
        self.until(self._is_settled, limit_s)
        self.steps(4, limit_s)

    def _is_settled(self) -> bool:
        try:
            status = self.status(timeout_s=2.0)
            living = {w.worker_id: w for w in status.workers if w.state == "running"}
            return (
                living.keys() == WORKERS.keys()
                and all(living[name].pid == self.process(name).pid for name in WORKERS)
                and {c.pid for c in status.controllers if c.state != "silent"}
                == {self.process(name).pid for name in CONTROLLERS}
                and all(w.version >= max(0, status.version - 2) for w in living.values())
                and all(living[n].mesh_epoch == status.mesh_epoch for n in ("policy-0", "policy-1"))
            )
        except (ControlPlaneUnavailable, RequestRefused, StopIteration, AssertionError, ValueError):
            return False

    def _record(self, rank: int) -> FleetRecord | None:
        home = self.run_dir if rank == 0 else self.run_dir / "nodes" / f"node-{rank}"
        return FleetRecord.read(home)

    def leave(self, name: str, status: int) -> None:
        failpoints.leave(self.armed, self.process(name).pid, status)

    def eat_memory(self, name: str) -> None:
        failpoints.eat_memory(self.armed, self.process(name).pid)

    def close(self) -> None:
        super().close()
        self.nodes.close()
