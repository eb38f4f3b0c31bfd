"""Ranks of a policy replica that is on several nodes: their names, their environment, and the point
at which they meet.

    node of rank 0 ── <run_dir>/nodes/policy-0.json: host, port ──► the other nodes start their ranks with it

A rank above 0 is no worker of the ledger: its replica is, under the name of rank 0.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from paceline.process.files import new_private_directory
from paceline.rpc.ports import free_ports, taken_ports
from paceline_launcher.node_placement import WorkerPlace

RANK = "rank"
"""Role of a process that is a rank above 0."""


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """Of the ranks of one replica: rank 0 listens there."""

    host: str
    port: int


def rank_name(replica: str, rank: int) -> str:
    """Rank 0 has the name of the replica."""
    return f"{replica}.{rank}" if rank else replica


def replica_of(name: str) -> str:
    """Of a name that ``rank_name`` made."""
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
    """What a rank was started with."""
    return MeetingPoint(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))


def publish_point(run_dir: Path, replica: str, host: str) -> MeetingPoint:
    """On the node of rank 0, before each of its starts. The port stays the same as long as it can
    be had."""
    before = read_point(run_dir, replica)
    if before is not None and before.host == host and not taken_ports("", [before.port]):
        return before
    point = MeetingPoint(host, *free_ports("", 1))
    path = _path(run_dir, replica)
    new_private_directory(path.parent)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_bytes(_POINT.dump_json(point) + b"\n")
    fresh.replace(path)
    return point


def read_point(run_dir: Path, replica: str) -> MeetingPoint | None:
    try:
        return _POINT.validate_json(_path(run_dir, replica).read_bytes())
    except (OSError, ValueError):
        return None


def _path(run_dir: Path, replica: str) -> Path:
    return run_dir / "nodes" / f"{replica}.json"


_POINT = TypeAdapter(MeetingPoint)
