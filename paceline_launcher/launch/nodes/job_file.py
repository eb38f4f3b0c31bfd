"""Files by which the nodes of a job find one another, in ``<run_dir>/nodes``.

    job.json        node 0 writes it at its start: who is node 0, and what all nodes must agree on
    outcome.json    node 0 writes it at its end: how the run ended, which is every node's exit status

Both name the session: a new one for every start of node 0. The directory of the run is therefore
one that all nodes share.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from paceline.config.load import to_toml
from paceline.config.schema import Config
from paceline.process.files import new_private_directory

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NodeJob:
    session: str
    run: str
    nodes: int
    gpus: int
    """Of each node."""
    roles: dict[str, tuple[int, ...]]
    settings: str
    """Digest of the settings that node 0 was started with."""
    addresses: tuple[str, ...] = field(default=())
    """Of the controllers."""

    def problem(self, other: NodeJob) -> str:
        """What ``other``, of another node, has differently; empty if they agree."""
        for name in ("run", "nodes", "gpus", "roles", "settings"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return _SAID[name].format(ours=ours, theirs=theirs)
        return ""


_SAID = {
    "run": "node 0 runs {ours!r}, and this node was started for {theirs!r}",
    "nodes": "node 0 is one of {ours} nodes, and this node one of {theirs}",
    "gpus": "node 0 counts on {ours} GPUs on each node, and this node has {theirs}. Give --gpus the lower number on every node",
    "roles": "node 0 places the roles as {ours}, and this node as {theirs} (--place)",
    "settings": "the settings of node 0 are others than this node's (RUN.toml and --set)",
}


@dataclass(frozen=True, slots=True)
class RunOutcome:
    session: str
    status: str
    """finished, failed or interrupted."""
    exit_code: int
    reason: str = ""


def settings_digest(config: Config) -> str:
    return hashlib.sha256(to_toml(config).encode()).hexdigest()[:32]


def node_directory(run_dir: Path, rank: int) -> Path:
    """Of the record of the processes on a node other than node 0."""
    return run_dir / "nodes" / f"node-{rank}"


def write_job(run_dir: Path, job: NodeJob) -> None:
    """Says that node 0 has started. The outcome of an earlier session is none any more."""
    (_home(run_dir) / "outcome.json").unlink(missing_ok=True)
    _replace(run_dir, "job.json", _JOB.dump_json(job, indent=1))


def read_job(run_dir: Path) -> NodeJob | None:
    return _read(run_dir, "job.json", _JOB)


def write_outcome(run_dir: Path, outcome: RunOutcome) -> None:
    _replace(run_dir, "outcome.json", _OUTCOME.dump_json(outcome, indent=1))


def read_outcome(run_dir: Path) -> RunOutcome | None:
    return _read(run_dir, "outcome.json", _OUTCOME)


def _home(run_dir: Path) -> Path:
    return new_private_directory(run_dir / "nodes")


def _replace(run_dir: Path, name: str, content: bytes) -> None:
    path = _home(run_dir) / name
    fresh = path.with_name(f".{name}.{os.getpid()}")
    fresh.write_bytes(content + b"\n")
    fresh.replace(path)


def _read(run_dir: Path, name: str, adapter: TypeAdapter[T]) -> T | None:
    try:
        return adapter.validate_json((run_dir / "nodes" / name).read_bytes())
    except (OSError, ValueError):
        return None


_JOB = TypeAdapter(NodeJob)
_OUTCOME = TypeAdapter(RunOutcome)
