"""Processes of one node: its share of the run's workers and, on node 0, the controllers.

Every node looks at the same status of the ledger and computes the same names, so that no two start the same worker and
none is left out:

    wanted names of a pool = the first N of: workers that are alive, then other numbers from 0 (draining ones excepted)

A node starts those of the wanted names that are placed on it, and drains those of its own that are not wanted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from paceline.node_placement import Placement
from paceline.process.job.visible_gpus import VARIABLE
from paceline.providers.base import GONE_OR_LEAVING, desired_of
from paceline.rpc.client import ControlPlaneUnavailable, RequestRefused
from paceline.run_view.events.event_follower import leader_status
from paceline.supervisor.child import ChildSpec
from paceline.supervisor.launch import Launcher
from paceline.supervisor.local import LocalFleet
from paceline.v1 import admin_pb2
from paceline.worker_pools import in_order, pool_of_worker, worker_name

POLL_S = 0.5
ASK_LIMIT_S = 2.0
GONE = ("stopped", "dead")


@dataclass(frozen=True, slots=True)
class Share:
    """What is this node's."""

    node: int
    placement: Placement
    gpus: tuple[str, ...] = ()
    """Names of this node's GPUs, as CUDA_VISIBLE_DEVICES takes them."""

    def devices(self, pool: str, index: int) -> dict[str, str]:
        """Variables that show a worker its GPUs and no others. Without GPUs there is nothing to say."""
        place = self.placement.of(pool, index)
        if place is None or not self.gpus:
            return {}
        return {VARIABLE: ",".join(self.gpus[number] for number in place.gpus)}

    def takes(self, pool: str, index: int) -> bool:
        place = self.placement.of(pool, index)
        return place is not None and place.node == self.node


def node_addresses(host: str, ports: Sequence[int]) -> list[str]:
    """Of the controllers on node 0."""
    shown = f"[{host}]" if ":" in host else host
    return [f"{shown}:{port}" for port in ports]


@dataclass(frozen=True, slots=True)
class NodeLauncher(Launcher):
    """``host``: address of node 0, under which every node reaches the controllers."""

    host: str
    share: Share

    @property
    def addresses(self) -> list[str]:
        return node_addresses(self.host, self.ports)

    def _advertised(self) -> tuple[str, ...]:
        return ("--advertise", self.host)

    def _devices(self, pool: str, index: int) -> dict[str, str]:
        return self.share.devices(pool, index)


def wanted(status: admin_pb2.StatusReply, pool: str, placement: Placement) -> list[int]:
    """Numbers of the workers of ``pool`` that the ledger's desired number stands for, on all nodes together."""
    mine = {
        _index(worker.worker_id): worker.state
        for worker in status.workers
        # A worker that somebody started by hand may have any name.
        if pool_of_worker(worker.worker_id) == pool
        and worker.worker_id.rpartition("-")[2].isdecimal()
    }
    draining = {index for index, state in mine.items() if state == "draining"}
    alive = {index for index, state in mine.items() if state not in GONE_OR_LEAVING}
    count = desired_of(status, pool)
    numbers = (set(range(count + len(draining))) | alive) - draining
    there = [index for index in numbers if index in alive or placement.of(pool, index) is not None]
    return sorted(there, key=lambda index: (index not in alive, index))[:count]


@dataclass(eq=False)
class NodeFleet(LocalFleet):
    """``share``: of this node."""

    share: Share | None = None

    def start_all(self) -> None:
        """Node 0: the controllers, and this node's workers of [fleet]."""
        for index in range(self.config.fleet.controllers):
            self._tend_new(self.launcher.controller(index))
        self.start_workers()

    def start_workers(self) -> None:
        """This node's workers of [fleet]."""
        share = self._share
        for name in share.placement.on(share.node):
            pool, index = pool_of_worker(name), _index(name)
            self._tend_new(self.launcher.worker(pool, index))

    async def reconcile(self, status: admin_pb2.StatusReply) -> None:
        """Starts and drains this node's workers until they are the wanted ones."""
        self._note_leaving(status)
        if self._ending.is_set() or status.phase not in ("waiting", "running", "paused"):
            return
        for pool in in_order(status.desired):
            names = {worker_name(pool, i) for i in wanted(status, pool, self._share.placement)}
            for name in sorted(names - self._roles.keys() - self._left):
                index = _index(name)
                if self._share.takes(pool, index) and not self._taken(name):
                    self.note(f"starting {name}")
                    self._tend_new(self.launcher.worker(pool, index))
            own = [n for n, r in self._roles.items() if r == pool and n not in self._leaving]
            for name in sorted(set(own) - names):
                await self._drain(name)

    async def wait_workers(self, names: Collection[str], limit_s: float) -> None:
        """Waits for the workers on other nodes too: they may be writing the last checkpoint."""
        elsewhere = {name for name in names if name not in self._tends}
        await asyncio.gather(
            super().wait_workers(names, limit_s), self._gone_elsewhere(elsewhere, limit_s)
        )

    async def leave(self) -> None:
        """Asks the ledger to let this node's workers go, without desiring fewer of them."""
        for name in [n for n in self._roles if n not in self._leaving]:
            await self._drain(name)

    def workers(self) -> list[str]:
        """Names of this node's workers that run or are about to."""
        return [name for name, role in self._roles.items() if role != "controller"]

    def _taken(self, name: str) -> bool:
        """Whether a worker that runs here has a GPU of ``name``: policy replicas and others may grow towards one another."""
        gpus = set(self._gpus_of(name))
        return any(gpus.intersection(self._gpus_of(other)) for other in self.workers())

    def _gpus_of(self, name: str) -> tuple[int, ...]:
        place = self._share.placement.of(pool_of_worker(name), _index(name))
        return place.gpus if place is not None else ()

    async def _gone_elsewhere(self, names: Collection[str], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while names and time.monotonic() < deadline:
            try:
                status = await leader_status(self.control, ASK_LIMIT_S)
            except (ControlPlaneUnavailable, RequestRefused):
                continue  # the call itself has waited
            if not any(w.worker_id in names and w.state not in GONE for w in status.workers):
                return
            await asyncio.sleep(POLL_S)

    def _others_of(self, spec: ChildSpec) -> list[str]:
        """On all nodes."""
        return [n for n in self._share.placement.names(spec.role) if n != spec.name]

    @property
    def _share(self) -> Share:
        assert self.share is not None
        return self.share


def _index(name: str) -> int:
    return int(name.rpartition("-")[2])
