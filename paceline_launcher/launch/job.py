"""Files by which the nodes of a job find one another, in ``<run_dir>/nodes``.

    job.json        node 0 writes it at its start: its address, and what all nodes must agree on
    outcome.json    node 0 writes it at its end: status of the run, the exit status of every node

Both name the session: a new one for every start of node 0. The directory of the run is therefore
one that all nodes share.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from paceline.config.load import changed_config
from paceline.config.schema import Config
from paceline.errors import BadInput
from paceline.process.files import new_private_directory, read_ours, replace_file
from paceline.process.torchrun_environment import port_number, whole_number
from paceline.rpc.addresses import is_loopback
from paceline.rpc.auth import TOKEN_FILE, read_token

T = TypeVar("T")
ANY_ADDRESS = "0.0.0.0"


@dataclass(frozen=True, slots=True)
class NodeJob:
    session: str
    run: str
    nodes: int
    gpus: int  # GPUs of each node
    settings: str  # digest of the settings that node 0 was started with
    addresses: tuple[str, ...] = ()  # addresses of the controllers

    def problem(self, other: "NodeJob") -> str:
        """The first thing that ``other``, of another node, has differently; empty if they agree."""
        for name, what in _AGREED.items():
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return f"node 0 has another {what} than this node: {ours}, here {theirs}"
        return ""


_AGREED = {
    "run": "run.name",
    "nodes": "number of nodes",
    "gpus": "number of GPUs (give --gpus the lower number on every node)",
    "settings": "digest of the settings (RUN.toml and --set)",
}


@dataclass(frozen=True, slots=True)
class RunOutcome:
    session: str
    status: str  # finished, failed or interrupted
    exit_code: int
    reason: str = ""


def served_settings(config: Config, place: "NodePlace", run_dir: Path) -> Config:
    """``config`` of node 0: other nodes can reach its controllers and its Redis, on known ports.
    Without a configured token, the run's own one is asked for: every node reads it in the run's
    directory."""
    changes: dict[str, object] = {}
    if place.port:
        first = config.controller.port or place.port
        changes["controller.port"] = first
        if config.redis.url is None:
            changes["redis.port"] = config.redis.port or first + config.fleet.controllers
    if not is_loopback(place.master):
        if is_loopback(config.controller.host):
            changes["controller.host"] = ANY_ADDRESS
        if config.redis.url is None and is_loopback(config.redis.host):
            changes["redis.host"] = ANY_ADDRESS
        if read_token(config.auth) is None:
            changes["auth.token_file"] = str(run_dir / TOKEN_FILE)
    return changed_config(config, changes)


def node_directory(run_dir: Path, rank: int) -> Path:
    """Directory of the record of the processes on a node other than node 0."""
    return run_dir / "nodes" / f"node-{rank}"


def write_job(run_dir: Path, job: NodeJob) -> None:
    """Tells other nodes that node 0 has started. The outcome of an earlier session is void then."""
    (run_dir / "nodes" / "outcome.json").unlink(missing_ok=True)
    write_node_file(run_dir, "job.json", job)


def read_job(run_dir: Path) -> NodeJob | None:
    return read_node_file(run_dir, "job.json", NodeJob)


def write_outcome(run_dir: Path, outcome: RunOutcome) -> None:
    write_node_file(run_dir, "outcome.json", outcome)


def read_outcome(run_dir: Path) -> RunOutcome | None:
    return read_node_file(run_dir, "outcome.json", RunOutcome)


def write_node_file(run_dir: Path, name: str, value: object) -> None:
    """Writes a dataclass as ``<run_dir>/nodes/<name>``, at once or not at all."""
    content = TypeAdapter(type(value)).dump_json(value, indent=1)
    replace_file(new_private_directory(run_dir / "nodes") / name, content + b"\n")


def read_node_file(run_dir: Path, name: str, kind: type[T]) -> T | None:
    """The value in ``<run_dir>/nodes/<name>``; None if it is missing or cannot be read. Raises
    NotOurs."""
    try:
        return TypeAdapter(kind).validate_json(read_ours(run_dir / "nodes" / name))
    except (OSError, ValueError):
        return None


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
    """The place that the options, or else ``environ``, give this node. ``master``: "host:port". The
    first of these that is set counts; without any of them the job is this machine.

    launcher                     rank of the node   number of nodes    address of node 0
    options                      --node-rank        --nodes            --master
    torchrun --nproc-per-node 1  GROUP_RANK         GROUP_WORLD_SIZE   MASTER_ADDR, MASTER_PORT
    PyTorchJob, TrainJob         PET_NODE_RANK      PET_NNODES         PET_MASTER_ADDR, ..._PORT
    PyTorchJob, PAI-DLC          RANK               WORLD_SIZE         MASTER_ADDR, MASTER_PORT

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
        return whole_number(environ, names[0], REMEDY), whole_number(environ, names[1], REMEDY)
    return 0, 1


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
