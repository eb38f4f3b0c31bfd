"""Node environment: a node's place among the nodes of a job, as launchers of PyTorch jobs set it.

    launcher                              rank of the node    number of nodes      address of node 0
    options                               --node-rank         --nodes              --master
    torchrun --nproc-per-node 1           GROUP_RANK          GROUP_WORLD_SIZE     MASTER_ADDR, MASTER_PORT
    PyTorchJob, TrainJob (for torchrun)   PET_NODE_RANK       PET_NNODES           PET_MASTER_ADDR, PET_MASTER_PORT
    PyTorchJob, PAI-DLC                   RANK                WORLD_SIZE           MASTER_ADDR, MASTER_PORT

The first of these that is set counts. Without any of them the job is this machine. Imports nothing
slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import BadInput

REMEDY = (
    "Start `paceline node` once on every node, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as PyTorchJob sets them, or "
    "with --node-rank, --nodes and --master HOST:PORT"
)
_ONE_MACHINE = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class NodePlace:
    """A node's place among the nodes of a job."""

    rank: int
    """From 0."""
    nodes: int
    master: str
    """Address of node 0."""
    port: int
    """First port that node 0 may use; 0 if the job is one machine without a port."""


def node_place(
    environ: Mapping[str, str],
    *,
    rank: int | None = None,
    nodes: int | None = None,
    master: str | None = None,
) -> NodePlace:
    """The place that the options, or else ``environ``, give this node. ``master``: "host:port".

    Raises BadInput if something is missing, or if two of them contradict each other.
    """
    rank, nodes = _numbers(environ, rank, nodes)
    if nodes < 1 or not 0 <= rank < nodes:
        raise BadInput(
            f"the rank of this node is {rank}, but there are {nodes} nodes: ranks go from 0 to {nodes - 1}. {REMEDY}"
        )
    host, port = _master(environ, nodes, master)
    return NodePlace(rank, nodes, host, port)


def _numbers(environ: Mapping[str, str], rank: int | None, nodes: int | None) -> tuple[int, int]:
    """Rank of this node, and number of nodes."""
    if (rank is None) != (nodes is None):
        given, missing = ("--node-rank", "--nodes") if nodes is None else ("--nodes", "--node-rank")
        raise BadInput(f"{given} is given without {missing}: give both, or neither")
    if rank is not None and nodes is not None:
        return rank, nodes
    if environ.get("GROUP_RANK") or environ.get("GROUP_WORLD_SIZE"):
        _check_one_process(environ)
        return _pair(environ, "GROUP_RANK", "GROUP_WORLD_SIZE")
    if environ.get("PET_NODE_RANK") or environ.get("PET_NNODES"):
        found = _pair(environ, "PET_NODE_RANK", "PET_NNODES")
        _check_agree(environ, found[0])
        return found
    if environ.get("RANK") or environ.get("WORLD_SIZE"):
        _check_one_process(environ)
        return _pair(environ, "RANK", "WORLD_SIZE")
    return 0, 1


def _check_one_process(environ: Mapping[str, str]) -> None:
    """Raises BadInput if the launcher starts several processes on this node."""
    local, size = environ.get("LOCAL_RANK") or "0", environ.get("LOCAL_WORLD_SIZE") or "1"
    if local != "0" or size != "1":
        raise BadInput(
            f"LOCAL_RANK={local} and LOCAL_WORLD_SIZE={size}: the launcher starts several processes on this node, but "
            "`paceline node` starts all processes of its node itself. Use torchrun --nproc-per-node 1"
        )


def _check_agree(environ: Mapping[str, str], rank: int) -> None:
    """An operator that sets both gives the node the same rank twice."""
    if environ.get("RANK") and "LOCAL_RANK" not in environ and _number(environ, "RANK") != rank:
        raise BadInput(
            f"PET_NODE_RANK={rank}, but RANK={environ['RANK']}: they name two different nodes. Unset one of them. {REMEDY}"
        )


def _pair(environ: Mapping[str, str], rank: str, nodes: str) -> tuple[int, int]:
    for given, missing in ((rank, nodes), (nodes, rank)):
        if not environ.get(missing):
            raise BadInput(f"the environment has {given}, but no {missing}. {REMEDY}")
    return _number(environ, rank), _number(environ, nodes)


def _master(environ: Mapping[str, str], nodes: int, given: str | None) -> tuple[str, int]:
    """Address and port of node 0."""
    if given is not None:
        host, _, text = given.rpartition(":")
        port = int(text) if text.isascii() and text.isdigit() else 0
        if not host or not 0 < port < 65536:
            raise BadInput(f"--master {given}: write HOST:PORT, the address of node 0")
        return host.strip("[]"), port
    host = environ.get("MASTER_ADDR") or environ.get("PET_MASTER_ADDR") or ""
    name = "MASTER_PORT" if environ.get("MASTER_PORT") else "PET_MASTER_PORT"
    if nodes == 1:
        # Nobody has to find this node.
        return _ONE_MACHINE, 0
    if not host:
        raise BadInput(f"there are {nodes} nodes, but no MASTER_ADDR names node 0. {REMEDY}")
    if not environ.get(name):
        raise BadInput(
            f"MASTER_ADDR={host}, but there is no MASTER_PORT, the first port that node 0 uses. {REMEDY}"
        )
    port = _number(environ, name)
    if not 0 < port < 65536:
        raise BadInput(f"{name}={port}: a port is between 1 and 65535. {REMEDY}")
    # torchrun's own store listens on the port itself.
    return host, port + (environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not (text.isascii() and text.isdigit()):
        hint = " An elastic range has no fixed number of nodes." if ":" in text else ""
        raise BadInput(f"{name}={text!r} is not a whole number from 0.{hint} {REMEDY}")
    return int(text)
