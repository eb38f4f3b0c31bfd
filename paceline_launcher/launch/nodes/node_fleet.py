"""Processes of one node: its share of the run's workers and, on node 0, the controllers.

Every node looks at the same status of the ledger and computes the same names, so that no two start
the same worker and none is left out:

    wanted names of a pool = the first N of: workers that are alive, then other numbers from 0 (draining ones excepted)

A node starts those of the wanted names that are placed on it, and drains those of its own that are
not wanted. Of a wanted replica that is on several nodes each starts the ranks that are its own, and
starts them again as often as the replica is.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Collection
from dataclasses import dataclass, replace

from paceline.observe.event_follower import leader_status
from paceline.providers.base import GONE_OR_LEAVING, desired_of
from paceline.rpc.client import ControlPlaneUnavailable, RequestRefused
from paceline.v1 import admin_pb2
from paceline.worker_pools import POLICY, in_order, pool_of_worker, worker_index, worker_name
from paceline_launcher.launch.child import Child, ChildSpec
from paceline_launcher.launch.local import LocalFleet
from paceline_launcher.launch.nodes.node_launcher import NodeLauncher, Share
from paceline_launcher.launch.nodes.spread_replica import (
    RANK,
    MeetingPoint,
    point_in,
    publish_point,
    rank_environment,
    rank_name,
    rank_of,
    read_point,
    replica_of,
)
from paceline_launcher.node_placement import Placement

POLL_S = 0.5
ASK_LIMIT_S = 2.0
GONE = ("stopped", "dead")


def wanted(status: admin_pb2.StatusReply, pool: str, placement: Placement) -> list[int]:
    """Numbers of the workers of ``pool`` that the ledger's desired number stands for, on all nodes
    together."""
    mine = {
        worker_index(worker.worker_id): worker.state
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
    """``share``: of this node. ``address``: of this node, for the others."""

    share: Share | None = None
    address: str = "127.0.0.1"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._going = False
        """This node has asked to leave the run: it starts nothing more."""

    def start_all(self) -> None:
        """Node 0: the controllers, and this node's workers of [fleet]."""
        for index in range(self.config.fleet.controllers):
            self._tend_new(self.launcher.controller(index))
        self.start_workers()

    def start_workers(self) -> None:
        """This node's workers of [fleet]."""
        share = self._share
        for name in share.placement.on(share.node):
            pool, index = pool_of_worker(name), worker_index(name)
            self._tend_new(self.launcher.worker(pool, index))
        for name in self._ranks(share.placement.names(POLICY)):
            self._tend_new(self._rank(name))

    async def reconcile(self, status: admin_pb2.StatusReply) -> None:
        """Starts and drains this node's workers until they are the wanted ones."""
        self._note_leaving(status)
        running = status.phase in ("waiting", "running", "paused")
        if self._ending.is_set() or self._going or not running:
            return
        for pool in in_order(status.desired):
            names = {worker_name(pool, i) for i in wanted(status, pool, self._share.placement)}
            for name in sorted(names - self._roles.keys() - self._left):
                index = worker_index(name)
                if self._share.takes(pool, index) and not self._taken(name):
                    self.note(f"starting {name}")
                    self._tend_new(self.launcher.worker(pool, index))
            own = [n for n, r in self._roles.items() if r == pool and n not in self._leaving]
            for name in sorted(set(own) - names):
                await self._drain(name)
            if pool == POLICY:
                self._reconcile_ranks(status, names)

    def _reconcile_ranks(self, status: admin_pb2.StatusReply, replicas: Collection[str]) -> None:
        """Starts the ranks of wanted replicas, and ends those whose replica has gone or meets
        elsewhere."""
        ranks = self._ranks(replicas)
        for name in sorted(set(ranks) - self._roles.keys() - self._left):
            if not self._taken(name):
                self.note(f"starting {name}")
                self._tend_new(self._rank(name))
        states = {worker.worker_id: worker.state for worker in status.workers}
        for name in [name for name, role in self._roles.items() if role == RANK]:
            child, replica = self._children.get(name), replica_of(name)
            if child is None or not child.running:
                continue
            gone = name not in ranks and states.get(replica, "dead") in GONE
            if gone:
                self._leaving.add(name)
            if gone or self._meets_elsewhere(child.spec, replica):
                child.terminate()

    def _meets_elsewhere(self, spec: ChildSpec, replica: str) -> bool:
        """Rank 0 is on another host, or port, than at the start of this rank: it would wait in
        vain."""
        point = read_point(self.launcher.run_dir, replica)
        return point is not None and point != point_in(spec.environment)

    async def wait_workers(self, names: Collection[str], limit_s: float) -> None:
        """Waits for the workers on other nodes too: they may be writing the last checkpoint."""
        elsewhere = {name for name in names if name not in self._tends}
        await asyncio.gather(
            super().wait_workers(names, limit_s), self._gone_elsewhere(elsewhere, limit_s)
        )

    async def leave(self) -> None:
        """Asks the ledger to let this node's workers go, without desiring fewer of them."""
        self._going = True
        for name in [n for n in self._roles if n not in self._leaving]:
            await self._drain(name, replica_of(name) if self._roles.get(name) == RANK else "")

    def workers(self) -> list[str]:
        """Names of this node's workers, and ranks of workers, that run or are about to."""
        return [name for name, role in self._roles.items() if role != "controller"]

    def _taken(self, name: str) -> bool:
        """Whether a worker that runs here has a GPU of ``name``: policy replicas and others may
        grow towards one another."""
        gpus, own = set(self._gpus_of(name)), replica_of(name)
        others = [other for other in self.workers() if replica_of(other) != own]
        return any(gpus.intersection(self._gpus_of(other)) for other in others)

    def _gpus_of(self, name: str) -> tuple[int, ...]:
        """On this node."""
        worker = replica_of(name)
        place = self._share.placement.of(pool_of_worker(worker), worker_index(worker))
        part = place.part_on(self._share.node) if place is not None else None
        return part.gpus if part is not None else ()

    def _ranks(self, replicas: Collection[str]) -> list[str]:
        """Names of those ranks above 0 that are this node's."""
        share = self._share
        found = share.placement.ranks_on(share.node, beyond=map(worker_index, replicas))
        return [
            rank_name(name, rank)
            for name, ranks in found.items()
            for rank in ranks
            if name in replicas and rank > 0
        ]

    def _rank(self, name: str) -> ChildSpec:
        assert isinstance(self.launcher, NodeLauncher)
        return self.launcher.rank(replica_of(name), rank_of(name))

    async def _ready(self, spec: ChildSpec) -> ChildSpec | None:
        """With the point at which the ranks of a replica on several nodes meet."""
        if spec.role not in (POLICY, RANK):
            return spec
        share, replica, rank = self._share, replica_of(spec.name), rank_of(spec.name)
        place = share.placement.of(POLICY, worker_index(replica))
        if place is None or not place.rest:
            return spec
        point = await self._point(replica, rank)
        if point is None:
            return None
        own = rank_environment(place, share.node, rank, point)
        return replace(spec, environment={**spec.environment, **own})

    async def _point(self, replica: str, rank: int) -> MeetingPoint | None:
        """None if the fleet ends, or this node leaves, first."""
        run_dir = self.launcher.run_dir
        if rank == 0:
            return await asyncio.to_thread(publish_point, run_dir, replica, self.address)
        while not (self._ending.is_set() or self._going):
            if (point := await asyncio.to_thread(read_point, run_dir, replica)) is not None:
                return point
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), POLL_S)
        return None

    async def _is_done(self, spec: ChildSpec, child: Child, code: int) -> bool:
        if spec.role != RANK:
            return await super()._is_done(spec, child, code)
        if code == 0 and not self.finished and spec.name not in self._leaving:
            await self._ask_about(replica_of(spec.name), spec.name)
        return self.finished or spec.name in self._leaving

    async def _ask_about(self, replica: str, name: str) -> None:
        """A rank that ends with 0 has followed its rank 0: the ledger knows why that one has left."""
        try:
            status = await leader_status(self.control, ASK_LIMIT_S)
        except (ControlPlaneUnavailable, RequestRefused):
            return
        self.finished = self.finished or status.phase == "finished"
        states = {worker.worker_id: worker.state for worker in status.workers}
        if states.get(replica) in GONE_OR_LEAVING:
            self._leaving.add(name)

    def _report_exit(self, spec: ChildSpec, child: Child, code: int) -> None:
        """A rank that something has killed: the end of its replica, which the ledger knows, follows
        from it."""
        if spec.role != RANK:
            super()._report_exit(spec, child, code)
        elif code < 0 and not child.signalled:
            task = asyncio.create_task(self.faults.report_end(child, code))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    def _counted(self, spec: ChildSpec, code: int) -> int:
        """A rank ends with 1 as soon as another one has ended. Failures of the replica are counted
        at rank 0."""
        return -signal.SIGKILL if spec.role == RANK and code == 1 else code

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
        pool, own = (POLICY, replica_of(spec.name)) if spec.role == RANK else (spec.role, spec.name)
        return [n for n in self._share.placement.names(pool) if n != own]

    @property
    def _share(self) -> Share:
        assert self.share is not None
        return self.share
