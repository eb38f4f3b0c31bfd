"""``paceline node``: the same command on every node of a job; each starts its share of one run."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.config.load import load_config, to_toml
from paceline.errors import BadInput, plural
from paceline.process.files import set_process_limits, without_links
from paceline_launcher.cli.common import (
    ConfigArgument,
    JsonOption,
    RunDirOption,
    SetOption,
    print_json,
)
from paceline_launcher.cli.up import run_to_end, steps_to_extend_to
from paceline_launcher.terminal import printable

if TYPE_CHECKING:
    from paceline.config.schema import Config
    from paceline_launcher.launch.job import NodeJob, NodePlace
    from paceline_launcher.launch.node_workers import NodeWorkers

NOTE_S = 3.0  # between two looks for an address


@dataclass(frozen=True, slots=True)
class _Node:
    """This node, as the command line and the environment describe it."""

    config: Config
    run_dir: Path
    place: NodePlace
    job: NodeJob
    workers: NodeWorkers


def node(
    config: ConfigArgument,
    *,
    overrides: SetOption = None,
    run_dir: RunDirOption = None,
    node_rank: int | None = None,
    nodes: int | None = None,
    master: str | None = None,
    gpus: Annotated[int | None, typer.Option(min=0)] = None,
    wait_s: Annotated[float, typer.Option(min=0)] = 600.0,
    dry_run: bool = False,
    as_json: JsonOption = False,
) -> None:
    """Run this node's share of a run: the same command on every node of a job.

    The environment of the job says which node this is: RANK and WORLD_SIZE (PyTorchJob, PAI-DLC),
    PET_NODE_RANK and PET_NNODES, or torchrun's with one process a node; MASTER_ADDR and MASTER_PORT
    name node 0. Node 0 runs Redis, the controllers and its workers, and writes the export and
    summary.json at the end. The other nodes run their share of the workers of [fleet]. The run
    directory is one that all nodes share. Every node ends with the exit status of the run. A node
    that is started again joins again; node 0 continues the run. With fleet.provider = "ray" or
    "none" the job is one node without workers.

    Example: paceline node run.toml --run-dir /shared/runs/try1

    Without such an environment: paceline node run.toml --node-rank 1 --nodes 2 --master node0:29500

    Args:
        node_rank: Number of this node, from 0. Default: of the environment.
        nodes: Number of nodes. Default: that of the environment.
        master HOST:PORT: Node 0, and the first port that it uses. Default: MASTER_ADDR and
            MASTER_PORT.
        gpus: GPUs to give out on each node. 0: workers share all. Default: those it sees.
        wait_s --wait SECONDS: How long node 0 may be silent.
        dry_run: Print what this node would start as JSON, and start nothing.
    """
    from paceline_launcher.launch.job import NodeJob, node_place
    from paceline_launcher.launch.node_workers import NodeWorkers
    from paceline_launcher.node_placement import Placement, gpus_for
    from paceline_launcher.preflight.checks import default_run_dir

    set_process_limits()
    here = node_place(os.environ, rank=node_rank, nodes=nodes, master=master)
    settings = load_config(config, overrides or ())
    elsewhere = _workers_elsewhere(settings, here)
    seen = () if elsewhere else gpus_for(settings.model.device, os.environ)
    if (gpus or 0) > len(seen) or (settings.model.device == "cuda" and not (seen or elsewhere)):
        raise BadInput(
            f"this node sees {len(seen)} GPUs, and model.device is {settings.model.device}: run "
            "nvidia-smi, and look at CUDA_VISIBLE_DEVICES and --gpus"
        )
    mine = seen if gpus is None else seen[:gpus]
    placement = Placement(settings, 0 if elsewhere else here.nodes, len(mine))
    workers = NodeWorkers(settings, placement=placement, node=here.rank, gpus=mine)
    directory = without_links(run_dir or default_run_dir(settings))
    digest = hashlib.sha256(to_toml(settings).encode()).hexdigest()[:32]
    job = NodeJob(uuid.uuid4().hex, settings.run.name, here.nodes, len(mine), digest)
    this = _Node(settings, directory, here, job, workers)
    if dry_run:
        plan = {"node": here.rank, "nodes": here.nodes, "master": f"{here.master}:{here.port}"}
        plan |= {"run_dir": str(directory), "workers": _workers_here(this)}
        plan |= {"redis": not here.rank and settings.redis.url is None}
        print_json({**plan, "controllers": 0 if here.rank else settings.fleet.controllers})
        return
    raise typer.Exit(_follow(this, wait_s) if here.rank else _lead(this, wait_s, as_json))


def _workers_elsewhere(settings: Config, place: NodePlace) -> bool:
    """True if Ray or other commands start the workers: this node has Redis and the controllers.
    Raises BadInput if that contradicts the job."""
    provider = settings.fleet.provider
    if provider == "local":
        return False
    if provider == "kubernetes" or place.nodes > 1:
        raise BadInput(
            f'fleet.provider = "{provider}": `paceline node` starts no workers then. Set '
            'fleet.provider = "local". Or let Ray or others start them: start it on one node '
            "(--node-rank 0 --nodes 1 --master HOST:PORT)"
        )
    return True


def _workers_here(this: _Node) -> dict[str, dict[str, list[Any]]]:
    """By name: GPUs and, for a replica on several nodes, the ranks that this node starts."""
    placement, node = this.workers.placement, this.place.rank
    assert placement is not None
    ranks = placement.ranks_on(node)
    found = {
        name: {"gpus": list[Any](this.workers.named(name))}
        for name in dict.fromkeys([*placement.on(node), *ranks])
    }
    for name, numbers in ranks.items():
        found[name]["ranks"] = list(numbers)
    return found


def _lead(this: _Node, wait_s: float, as_json: bool) -> int:
    from paceline.redis.server import stop_redis
    from paceline.rpc.auth import own_token
    from paceline_launcher.launch.job import served_settings
    from paceline_launcher.launch.run_dir import check_no_leader, end_leftovers, locked
    from paceline_launcher.preflight.checks import Place, passed
    from paceline_launcher.preflight.findings import Start

    with locked(this.run_dir):
        extends_to = steps_to_extend_to(this.config, this.run_dir)
        if left := end_leftovers(this.run_dir):
            typer.echo(
                f"ended {plural(len(left), 'process')} that an earlier start left behind", err=True
            )
        # It may listen on other addresses than those that the nodes need.
        stop_redis(this.run_dir)
        settings = served_settings(this.config, this.place, this.run_dir)
        own_token(this.run_dir)
        at = Place.ANYWHERE | Place.CONTROL
        at |= Place.WORKERS if settings.fleet.provider == "local" else Place(0)
        passed(Start(settings, this.run_dir, here=True, placed=_workers_here(this)), at)
        check_no_leader(settings)
        _resolved(this.place.master, wait_s)
        names = ", ".join(_workers_here(this)) or "no worker"
        return run_to_end(
            settings,
            this.run_dir,
            this.workers,
            f"node 0 of {this.place.nodes}: Redis, controllers, {names} in {this.run_dir}",
            as_json=as_json,
            extends_to=extends_to,
            master=this.place.master,
            job=this.job,
        )


def _resolved(host: str, wait_s: float) -> None:
    """Waits until the name of node 0 has an address: a cluster's name server learns of a new pod
    late. Raises BadInput."""
    began = time.monotonic()
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            if time.monotonic() - began >= wait_s:
                raise BadInput(
                    f"MASTER_ADDR={host} has no address after {wait_s:g} s: {error}. Give --master "
                    "HOST:PORT with an address of node 0 that the other nodes reach"
                ) from None
        typer.echo(f"waiting for an address of {host} (at most {wait_s:g} s)", err=True)
        time.sleep(min(NOTE_S, wait_s))


def _follow(this: _Node, wait_s: float) -> int:
    from paceline_launcher.launch.follower import FollowingNode
    from paceline_launcher.launch.job import node_directory
    from paceline_launcher.launch.run_dir import end_leftovers, locked
    from paceline_launcher.live_view import RunOutput
    from paceline_launcher.preflight.checks import Place, passed
    from paceline_launcher.preflight.findings import Start

    output = RunOutput(node_directory(this.run_dir, this.place.rank) / "node.log")

    def note(line: str) -> None:
        text = f"node {this.place.rank}: {printable(line)}"
        output.print(text, markup=False, highlight=False, soft_wrap=True)

    node = FollowingNode(this.place, this.run_dir, this.job, wait_s, note, this.workers)
    placed = _workers_here(this)
    passed(Start(this.config, this.run_dir, here=True, placed=placed), Place.WORKERS)
    home = node_directory(this.run_dir, this.place.rank)
    with locked(home):
        if left := end_leftovers(home):
            note(f"ended {plural(len(left), 'process')} that an earlier start left behind")
        return asyncio.run(node.run())
