"""Ranks of a policy replica that is on several nodes: their names, and the point where they meet.

    node of rank 0 ── <run_dir>/nodes/policy-0.json: host, port ──► other nodes start their ranks

A rank above 0 is no worker of the ledger: its replica is, under the name of rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from paceline.rpc.ports import free_ports, taken_ports
from paceline_launcher.launch.job import read_file, replace_file
from paceline_launcher.node_placement import WorkerPlace

RANK = "rank"  # role of a process that is a rank above 0


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """Address at which rank 0 of a replica serves the store through which its ranks meet."""

    host: str
    port: int


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
    replace_file(run_dir, f"{replica}.json", _POINT.dump_json(point))
    return point


def read_point(run_dir: Path, replica: str) -> MeetingPoint | None:
    return read_file(run_dir, f"{replica}.json", _POINT)


_POINT = TypeAdapter(MeetingPoint)
