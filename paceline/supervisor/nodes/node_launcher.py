"""Launcher of one node of several: node 0's address, and the ranks of replicas on several nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.supervisor.child import ChildSpec
from paceline.supervisor.launch import Launcher
from paceline.supervisor.nodes.spread_replica import RANK, rank_name
from paceline.worker_pools import POLICY, worker_index


def node_addresses(host: str, ports: Sequence[int]) -> list[str]:
    """Of the controllers on node 0."""
    shown = f"[{host}]" if ":" in host else host
    return [f"{shown}:{port}" for port in ports]


@dataclass(frozen=True, slots=True)
class NodeLauncher(Launcher):
    host: str
    """Address of node 0, under which every node reaches the controllers."""

    @property
    def addresses(self) -> list[str]:
        return node_addresses(self.host, self.ports)

    def _advertised(self) -> tuple[str, ...]:
        return ("--advertise", self.host)

    def rank(self, replica: str, rank: int) -> ChildSpec:
        """A rank above 0. The fleet adds the place at which it meets the others."""
        spec, name = self.worker(POLICY, worker_index(replica)), rank_name(replica, rank)
        return replace(spec, name=name, role=RANK, log=spec.log.with_name(f"{name}.log"))
