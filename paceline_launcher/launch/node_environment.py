"""Node environment: a node's place among the nodes of a job, as launchers of PyTorch jobs set it.

    launcher                     rank of the node   number of nodes    address of node 0
    options                      --node-rank        --nodes            --master
    torchrun --nproc-per-node 1  GROUP_RANK         GROUP_WORLD_SIZE   MASTER_ADDR, MASTER_PORT
    PyTorchJob, TrainJob         PET_NODE_RANK      PET_NNODES         PET_MASTER_ADDR, ..._PORT
    PyTorchJob, PAI-DLC          RANK               WORLD_SIZE         MASTER_ADDR, MASTER_PORT

The first of these that is set counts. Without any of them the job is this machine. Imports nothing
slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import BadInput
from paceline.process.torchrun_environment import port_number, whole_number

REMEDY = (
    "Start `paceline node` once on every node, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT "
    "as PyTorchJob sets them, or with --node-rank, --nodes and --master HOST:PORT"
)
NUMBERS = (
    ("GROUP_RANK", "GROUP_WORLD_SIZE"),
    ("PET_NODE_RANK", "PET_NNODES"),
    ("RANK", "WORLD_SIZE"),
)


@dataclass(frozen=True, slots=True)
class NodePlace:
    """A node's place among the nodes of a job."""

    rank: int  # from 0
    nodes: int
    master: str  # address of node 0
    port: int  # first port that node 0 may use; 0 if the job is one machine without a port


def node_place(
    environ: Mapping[str, str],
    *,
    rank: int | None = None,
    nodes: int | None = None,
    master: str | None = None,
) -> NodePlace:
    """The place that the options, or else ``environ``, give this node. ``master``: "host:port".
    Raises BadInput if something is missing, or if two of them contradict each other."""
    if (rank is None) != (nodes is None):
        given, missing = ("--node-rank", "--nodes") if nodes is None else ("--nodes", "--node-rank")
        raise BadInput(f"{given} is given without {missing}: give both, or neither")
    if rank is None or nodes is None:
        rank, nodes = _numbers(environ)
    if nodes < 1 or not 0 <= rank < nodes:
        raise BadInput(
            f"the rank of this node is {rank}, but there are {nodes} nodes: ranks go from 0 to "
            f"{nodes - 1}. {REMEDY}"
        )
    return NodePlace(rank, nodes, *_master(environ, nodes, master))


def _numbers(environ: Mapping[str, str]) -> tuple[int, int]:
    """Rank of this node, and number of nodes."""
    for names in NUMBERS:
        if not any(environ.get(name) for name in names):
            continue
        for given, missing in (names, names[::-1]):
            if not environ.get(missing):
                raise BadInput(f"the environment has {given}, but no {missing}. {REMEDY}")
        rank, nodes = (whole_number(environ, name, REMEDY) for name in names)
        if names[0] != "PET_NODE_RANK":
            _check_one_process(environ)
        elif environ.get("RANK") and "LOCAL_RANK" not in environ and environ["RANK"] != str(rank):
            raise BadInput(
                f"PET_NODE_RANK={rank}, but RANK={environ['RANK']}: they name two different nodes. "
                f"Unset one of them. {REMEDY}"
            )
        return rank, nodes
    return 0, 1


def _check_one_process(environ: Mapping[str, str]) -> None:
    """Raises BadInput if the launcher starts several processes on this node."""
    local, size = environ.get("LOCAL_RANK") or "0", environ.get("LOCAL_WORLD_SIZE") or "1"
    if local != "0" or size != "1":
        raise BadInput(
            f"LOCAL_RANK={local} and LOCAL_WORLD_SIZE={size}: the launcher starts several "
            "processes on this node, but `paceline node` starts all processes of its node itself. "
            "Use torchrun --nproc-per-node 1"
        )


def _master(environ: Mapping[str, str], nodes: int, given: str | None) -> tuple[str, int]:
    """Address and port of node 0."""
    if given is not None:
        host, _, text = given.rpartition(":")
        port = int(text) if text.isascii() and text.isdigit() else 0
        if not host or not 0 < port < 65536:
            raise BadInput(f"--master {given}: write HOST:PORT, the address of node 0")
        return host.strip("[]"), port
    if nodes == 1:
        return "127.0.0.1", 0  # nobody has to find this node
    host = environ.get("MASTER_ADDR") or environ.get("PET_MASTER_ADDR") or ""
    if not host:
        raise BadInput(f"there are {nodes} nodes, but no MASTER_ADDR names node 0. {REMEDY}")
    name = "MASTER_PORT" if environ.get("MASTER_PORT") else "PET_MASTER_PORT"
    if not environ.get(name):
        raise BadInput(
            f"MASTER_ADDR={host}, but there is no MASTER_PORT, the first port that node 0 uses. "
            f"{REMEDY}"
        )
    # torchrun's own store listens on the port itself.
    own_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return host, port_number(environ, name, REMEDY) + own_store
