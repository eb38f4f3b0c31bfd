"""Files by which the nodes of a job find one another, in ``<run_dir>/nodes``.

    job.json        node 0 writes it at its start: its address, and what all nodes must agree on
    outcome.json    node 0 writes it at its end: status of the run, the exit status of every node

Both name the session: a new one for every start of node 0. The directory of the run is therefore
one that all nodes share.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from paceline.config.load import changed_config
from paceline.config.schema import Config
from paceline.process.files import new_private_directory, read_ours
from paceline.rpc.addresses import is_loopback
from paceline.rpc.auth import TOKEN_FILE, read_token
from paceline_launcher.launch.node_environment import NodePlace

T = TypeVar("T")
ANY_ADDRESS = "0.0.0.0"


@dataclass(frozen=True, slots=True)
class NodeJob:
    session: str
    run: str
    nodes: int
    gpus: int  # GPUs of each node
    roles: dict[str, tuple[int, ...]]
    settings: str  # digest of the settings that node 0 was started with
    addresses: tuple[str, ...] = ()  # addresses of the controllers

    def problem(self, other: NodeJob) -> str:
        """The first thing that ``other``, of another node, has differently; empty if they agree."""
        for name, text in _DIFFERENCES.items():
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return text.format(ours=ours, theirs=theirs)
        return ""


_DIFFERENCES = {
    "run": "node 0 runs {ours!r}, and this node was started for {theirs!r}",
    "nodes": "node 0 is one of {ours} nodes, and this node one of {theirs}",
    "gpus": "node 0 counts on {ours} GPUs on each node, and this node has {theirs}. Give --gpus "
    "the lower number on every node",
    "roles": "node 0 places the roles as {ours}, and this node as {theirs} (--place)",
    "settings": "the settings of node 0 are others than this node's (RUN.toml and --set)",
}


@dataclass(frozen=True, slots=True)
class RunOutcome:
    session: str
    status: str  # finished, failed or interrupted
    exit_code: int
    reason: str = ""


def served_settings(config: Config, place: NodePlace, run_dir: Path) -> Config:
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
    replace_file(run_dir, "job.json", _JOB.dump_json(job, indent=1))


def read_job(run_dir: Path) -> NodeJob | None:
    return read_file(run_dir, "job.json", _JOB)


def write_outcome(run_dir: Path, outcome: RunOutcome) -> None:
    replace_file(run_dir, "outcome.json", _OUTCOME.dump_json(outcome, indent=1))


def read_outcome(run_dir: Path) -> RunOutcome | None:
    return read_file(run_dir, "outcome.json", _OUTCOME)


def replace_file(run_dir: Path, name: str, content: bytes) -> None:
    """Writes ``<run_dir>/nodes/<name>`` at once or not at all."""
    path = new_private_directory(run_dir / "nodes") / name
    fresh = path.with_name(f".{name}.{os.getpid()}")
    fresh.write_bytes(content + b"\n")
    fresh.replace(path)


def read_file(run_dir: Path, name: str, adapter: TypeAdapter[T]) -> T | None:
    """The value in ``<run_dir>/nodes/<name>``; None if it is missing or cannot be read. Raises
    NotOurs."""
    try:
        return adapter.validate_json(read_ours(run_dir / "nodes" / name))
    except (OSError, ValueError):
        return None


_JOB = TypeAdapter(NodeJob)
_OUTCOME = TypeAdapter(RunOutcome)
