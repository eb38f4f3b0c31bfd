"""Launcher of one node: its share of the run's workers, the GPUs that each of them sees, and node
0's address."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.worker_pools import POLICY, worker_index
from paceline_launcher.launch.child import ChildSpec
from paceline_launcher.launch.launch import Launcher
from paceline_launcher.launch.nodes.spread_replica import RANK, rank_name
from paceline_launcher.machine_gpus import VARIABLE
from paceline_launcher.node_placement import Placement


@dataclass(frozen=True, slots=True)
class Share:
    """What is this node's."""

    node: int
    placement: Placement
    gpus: tuple[str, ...] = ()
    """Names of this node's GPUs, as CUDA_VISIBLE_DEVICES takes them."""

    def devices(self, pool: str, index: int) -> dict[str, str]:
        """Variables that show a worker its GPUs and no others. Without GPUs there is nothing to
        say."""
        whole = self.placement.of(pool, index)
        place = whole.part_on(self.node) if whole is not None else None
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

    def rank(self, replica: str, rank: int) -> ChildSpec:
        """A rank above 0. The fleet adds the place at which it meets the others."""
        spec, name = self.worker(POLICY, worker_index(replica)), rank_name(replica, rank)
        return replace(spec, name=name, role=RANK, log=spec.log.with_name(f"{name}.log"))
