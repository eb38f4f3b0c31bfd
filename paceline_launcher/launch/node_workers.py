"""Workers of a run that one node starts, and the GPUs that each of them sees.

    one node        the desired number of workers, with the first GPUs that are free
    several nodes   those that the placement puts on this node, with the GPUs that it names

Several nodes look at the same status of the ledger and compute the same names, so that no two start
the same worker and none is left out:

    wanted numbers of a pool = the first N of: workers that are alive, then other numbers from 0

Draining workers are none of them.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.config.schema import Config
from paceline.providers.base import GONE_OR_LEAVING, desired_of
from paceline.rpc.addresses import free_ports, taken_ports
from paceline.v1 import admin_pb2
from paceline.worker_pools import (
    POLICY,
    desired_workers,
    pool_of_worker,
    share_device,
    worker_index,
    worker_name,
)
from paceline_launcher.launch.job import read_node_file, write_node_file
from paceline_launcher.node_placement import MachineGpus, Placement, WorkerPlace


@dataclass(frozen=True, slots=True)
class NodeWorkers:
    config: Config
    machine: MachineGpus | None = None
    """GPUs to be given out as workers come and go; None: all workers see the same."""
    placement: Placement | None = None
    """Places of the workers on the nodes of the job; None: this is the only node."""
    node: int = 0
    gpus: tuple[str, ...] = ()
    """Names of this node's GPUs with a placement, as CUDA_VISIBLE_DEVICES takes them."""

    def first(self) -> list[str]:
        """Names of the processes of [fleet] on this node: workers, then ranks above 0."""
        if self.placement is None:
            pools = desired_workers(self.config).items()
            return [worker_name(pool, index) for pool, count in pools for index in range(count)]
        return [*self.placement.on(self.node), *self.ranks(self.placement.names(POLICY))]

    @property
    def shared(self) -> bool:
        """True if several workers here may compute on one GPU."""
        return self.machine.shared if self.machine is not None else not self.gpus

    def ranks(self, replicas: Collection[str]) -> list[str]:
        """Names of this node's ranks above 0 of ``replicas``."""
        if self.placement is None:
            return []
        on_node = self.placement.ranks_on(self.node, beyond=map(worker_index, replicas))
        return [
            rank_name(name, rank)
            for name, ranks in on_node.items()
            for rank in ranks
            if name in replicas and rank > 0
        ]

    def place_of(self, name: str) -> WorkerPlace | None:
        """Place of a worker, or of a rank's replica, among the nodes."""
        if self.placement is None:
            return None
        replica = replica_of(name)
        return self.placement.of(pool_of_worker(replica), worker_index(replica))

    def is_here(self, name: str) -> bool:
        """True if this node starts worker ``name``."""
        place = self.place_of(name)
        return self.placement is None or (place is not None and place.node == self.node)

    def take(self, name: str, running: Collection[str]) -> tuple[str, ...] | None:
        """GPUs of a process that is about to start; None if too few are free. ``running``: names of
        the processes of this node that run or are about to."""
        if self.placement is None:
            return self.machine.take(name, running) if self.machine is not None else ()
        numbers = self._gpus_of(name)
        # Policy replicas and other workers may grow towards one another.
        worker, config = replica_of(name), self.config
        others = (n for n in running if not share_device(config, worker, replica_of(n)))
        if any(not numbers.isdisjoint(self._gpus_of(other)) for other in others):
            return None
        return self.named(name)

    def named(self, name: str) -> tuple[str, ...]:
        """GPUs that the placement gives a process on this node; all are seen if it gives none."""
        return tuple(self.gpus[number] for number in sorted(self._gpus_of(name)) if self.gpus)

    def wanted(
        self, status: admin_pb2.StatusReply, pool: str, staying: Iterable[str], here: Iterable[str]
    ) -> set[str]:
        """Names of the workers of ``pool`` that the ledger's desired number stands for.
        ``staying``: this node's workers that were not asked to leave; ``here``: all that run."""
        if self.placement is not None:
            numbers = wanted_on_nodes(status, pool, self.placement)
        else:
            # Workers that others have started, by hand, are none of the desired ones.
            stay = {worker_index(name) for name in staying}
            leave = {worker_index(name) for name in here} - stay
            numbers = _first_numbers(desired_of(status, pool), stay, leave)
        return {worker_name(pool, number) for number in numbers}

    def _gpus_of(self, name: str) -> set[int]:
        place = self.place_of(name)
        part = place.part_on(self.node) if place is not None else None
        return set(part.gpus) if part is not None else set()


def wanted_on_nodes(status: admin_pb2.StatusReply, pool: str, placement: Placement) -> list[int]:
    """Numbers of the wanted workers of ``pool`` on all nodes together."""
    states = {
        worker_index(worker.worker_id): worker.state
        for worker in status.workers
        # A worker that somebody started by hand may have any name.
        if pool_of_worker(worker.worker_id) == pool
        and worker.worker_id.rpartition("-")[2].isdecimal()
    }
    alive = {index for index, state in states.items() if state not in GONE_OR_LEAVING}
    draining = {index for index, state in states.items() if state == "draining"}
    count = desired_of(status, pool)
    roomless = {
        index
        for index in range(count + len(draining))
        if index not in alive and placement.of(pool, index) is None
    }
    return _first_numbers(count, alive, draining, roomless)


def _first_numbers(
    count: int, alive: set[int], leaving: set[int], roomless: Collection[int] = ()
) -> list[int]:
    numbers = (set(range(count + len(leaving))) - set(roomless) | alive) - leaving
    return sorted(numbers, key=lambda number: (number not in alive, number))[:count]


RANK = "rank"  # role of a process that is a rank above 0


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """Address at which rank 0 of a replica serves the store through which its ranks meet."""

    host: str
    port: int


# A rank above 0 is no worker of the ledger: its replica is, under the name of rank 0.


def rank_name(replica: str, rank: int) -> str:
    """Rank 0 has the name of the replica."""
    return f"{replica}.{rank}" if rank else replica


def replica_of(name: str) -> str:
    """Replica of a name that ``rank_name`` made."""
    return name.partition(".")[0]


def rank_of(name: str) -> int:
    return int(name.partition(".")[2] or 0)


def rank_environment(
    place: WorkerPlace, node: int, rank: int, point: MeetingPoint
) -> dict[str, str]:
    """Variables that make a process on ``node`` that rank, as torchrun sets them."""
    here = place.ranks_on(node)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(sum(len(part.gpus) for part in (place, *place.rest))),
        "LOCAL_RANK": str(rank - here.start),
        "LOCAL_WORLD_SIZE": str(len(here)),
        "MASTER_ADDR": point.host,
        "MASTER_PORT": str(point.port),
        # A torchrun that has started this node serves a store for its own processes alone.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_RUN_ID": "",
        "TORCHELASTIC_RESTART_COUNT": "",
    }


def point_in(environment: Mapping[str, str]) -> MeetingPoint:
    """The point that a rank was started with."""
    return MeetingPoint(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))


def publish_point(run_dir: Path, replica: str, host: str) -> MeetingPoint:
    """Writes the point before each start of rank 0. The port stays the same while it is free."""
    before = read_point(run_dir, replica)
    if before is not None and before.host == host and not taken_ports("", [before.port]):
        return before
    point = MeetingPoint(host, *free_ports("", 1))
    write_node_file(run_dir, f"{replica}.json", point)
    return point


def read_point(run_dir: Path, replica: str) -> MeetingPoint | None:
    return read_node_file(run_dir, f"{replica}.json", MeetingPoint)
