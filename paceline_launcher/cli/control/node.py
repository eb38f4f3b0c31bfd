"""``paceline node``: the same command on every node of a job; each starts its share of one run."""

from __future__ import annotations

import asyncio
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import BadInput
from paceline_launcher.cli.common import (
    ConfigArgument,
    JsonOption,
    RunDirOption,
    SetOption,
    print_json,
)

if TYPE_CHECKING:
    from paceline.config.schema import Config
    from paceline_launcher.launch.node_environment import NodePlace
    from paceline_launcher.launch.nodes.job_file import NodeJob
    from paceline_launcher.launch.nodes.node_launcher import Share


@dataclass(frozen=True, slots=True)
class _Node:
    """This node, and what it was started with."""

    config: Config
    run_dir: Path
    place: NodePlace
    job: NodeJob
    share: Share


def node(
    config: ConfigArgument,
    overrides: SetOption = None,
    run_dir: RunDirOption = None,
    node_rank: Annotated[
        int | None,
        typer.Option(
            "--node-rank", help="Number of this node, from 0. Default: of the environment."
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option("--nodes", help="Number of nodes. Default: that of the environment."),
    ] = None,
    master: Annotated[
        str | None,
        typer.Option(
            "--master",
            metavar="HOST:PORT",
            help="Node 0, and the first port that it uses. Default: MASTER_ADDR and MASTER_PORT.",
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="GPUs to give out on each node. 0: workers share all of them. Default: all that this node sees.",
        ),
    ] = None,
    place: Annotated[
        list[str] | None,
        typer.Option(
            "--place",
            metavar="ROLE=NODES",
            help="Nodes of a role: policy=0, rollout=1-3. May be repeated. Default: by GPUs.",
        ),
    ] = None,
    wait_s: Annotated[
        float,
        typer.Option("--wait", min=0, metavar="SECONDS", help="How long node 0 may be silent."),
    ] = 600.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what this node would start, and start nothing.")
    ] = False,
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
    """
    from paceline.process.files import set_process_limits

    set_process_limits()
    this = _this_node(config, overrides, run_dir, (node_rank, nodes, master), gpus, place or [])
    if dry_run:
        _print_plan(this, as_json)
        return
    if this.place.rank == 0:
        raise typer.Exit(_first(this, wait_s, as_json))
    raise typer.Exit(_other(this, wait_s))


def _this_node(
    config: Path,
    overrides: list[str] | None,
    run_dir: Path | None,
    given: tuple[int | None, int | None, str | None],
    gpus: int | None,
    places: list[str],
) -> _Node:
    """Raises BadInput if the command line, the environment or the settings contradict one another."""
    from paceline.config.load import load_config
    from paceline_launcher.launch.node_environment import node_place
    from paceline_launcher.launch.nodes.job_file import NodeJob, settings_digest
    from paceline_launcher.launch.nodes.node_launcher import Share
    from paceline_launcher.machine_gpus import gpus_for
    from paceline_launcher.node_placement import Nodes, NoPlacement, Placement, parse_roles
    from paceline_launcher.preflight import default_run_dir
    from paceline_launcher.preflight.deadline import resolve_in_time

    rank, count, master = given
    place = node_place(os.environ, rank=rank, nodes=count, master=master)
    settings = load_config(config, overrides or ())
    elsewhere = _workers_elsewhere(settings, place)
    seen = () if elsewhere else gpus_for(settings.model.device, os.environ)
    if gpus is not None and gpus > len(seen):
        raise BadInput(
            f"--gpus {gpus}: this node sees {len(seen)} GPUs, and model.device is {settings.model.device}"
        )
    mine = seen if gpus is None else seen[:gpus]
    if settings.model.device == "cuda" and not seen and not elsewhere:
        raise BadInput(
            'model.device is "cuda", but this node sees no GPU: run nvidia-smi, and look at CUDA_VISIBLE_DEVICES'
        )
    roles = parse_roles(places, place.nodes)
    shape = Nodes(place.nodes, len(mine), roles)
    placement = NoPlacement() if elsewhere else Placement(settings, shape)
    share = Share(place.rank, placement, mine)
    directory = resolve_in_time(run_dir or default_run_dir(settings))
    digest = settings_digest(settings)
    job = NodeJob(uuid.uuid4().hex, settings.run.name, place.nodes, len(mine), roles, digest)
    return _Node(settings, directory, place, job, share)


def _workers_elsewhere(settings: Config, place: NodePlace) -> bool:
    """Whether Ray or other commands start the workers: this node has Redis and the controllers.
    Raises BadInput."""
    provider = settings.fleet.provider
    if provider == "local":
        return False
    if provider == "kubernetes":
        raise BadInput(
            f"fleet.provider: {provider} starts the workers of this run. Set fleet.provider = "
            '"local" to have `paceline node` start them'
        )
    if place.nodes > 1:
        raise BadInput(
            f'fleet.provider = "{provider}": `paceline node` starts no workers, and there are {place.nodes} nodes. Start it on '
            "one node (--node-rank 0 --nodes 1 --master HOST:PORT)"
        )
    return True


def _print_plan(this: _Node, as_json: bool) -> None:
    started = _workers_here(this)
    first = this.place.rank == 0
    controllers = this.config.fleet.controllers if first else 0
    if as_json:
        print_json(
            {
                "node": this.place.rank,
                "nodes": this.place.nodes,
                "master": f"{this.place.master}:{this.place.port}",
                "run_dir": str(this.run_dir),
                "redis": first and this.config.redis.url is None,
                "controllers": controllers,
                "workers": started,
            }
        )
        return
    at = f", node 0 at {this.place.master}:{this.place.port}" if this.place.port else ""
    typer.echo(f"node {this.place.rank} of {this.place.nodes}{at}, run directory {this.run_dir}")
    if first:
        typer.echo("Redis" if this.config.redis.url is None else "Redis: that of redis.url")
        typer.echo(f"{controllers} controllers")
    for name, of in started.items():
        ranks = f" ranks {of['ranks'][0]} to {of['ranks'][-1]}" if "ranks" in of else ""
        typer.echo(f"{name}{ranks}" + (f" on GPUs {','.join(of['gpus'])}" if of["gpus"] else ""))
    if not started:
        typer.echo("no worker")


def _workers_here(this: _Node) -> dict[str, dict[str, list[Any]]]:
    """By name: GPUs and, of a replica on several nodes, the ranks that this node starts."""
    from paceline.worker_pools import pool_of_worker, worker_index
    from paceline_launcher.machine_gpus import VARIABLE

    placement, node = this.share.placement, this.place.rank
    places = placement.on(node)
    ranks = placement.ranks_on(node)
    found: dict[str, dict[str, list[Any]]] = {}
    for name in [*places, *(replica for replica in ranks if replica not in places)]:
        pool, index = pool_of_worker(name), worker_index(name)
        shown = this.share.devices(pool, index).get(VARIABLE, "")
        found[name] = {"gpus": shown.split(",") if shown else []}
        if name in ranks:
            found[name]["ranks"] = list(ranks[name])
    return found


def _first(this: _Node, wait_s: float, as_json: bool) -> int:
    """Node 0. Returns the exit status of the run."""
    from dataclasses import replace

    from paceline.observe.summary import can_extend, read_summary
    from paceline.redis.server import stop_redis
    from paceline.rpc.auth import own_token
    from paceline_launcher.cli.control.up import check, print_outcome
    from paceline_launcher.launch.launch import controller_ports
    from paceline_launcher.launch.nodes.first_node import FirstNode, served_settings
    from paceline_launcher.launch.nodes.node_launcher import node_addresses
    from paceline_launcher.launch.run_dir_lock import check_no_leader, end_leftovers, locked
    from paceline_launcher.launch.up import Outcome
    from paceline_launcher.preflight.inputs.run_length import steps_of

    with locked(this.run_dir):
        extends = can_extend(read_summary(this.run_dir), lambda: steps_of(this.config))
        if left := end_leftovers(this.run_dir):
            typer.echo(f"ended {len(left)} processes that an earlier start left behind", err=True)
        # It may listen on other addresses than those that the nodes need.
        stop_redis(this.run_dir)
        settings = served_settings(this.config, this.place, this.run_dir)
        own_token(this.run_dir)
        here = settings.fleet.provider == "local"
        check(settings, this.run_dir, fresh=False, workers=here, placed=True)
        check_no_leader(settings)
        _resolved(this.place.master, wait_s)
        ports = controller_ports(settings)
        addresses = node_addresses(this.place.master, ports)
        job = replace(this.job, addresses=tuple(addresses))
        console = _console(this, as_json)

        async def run() -> Outcome:
            first = FirstNode(
                settings,
                this.run_dir,
                console,
                extends_to=steps_of(settings) if extends else 0,
                place=this.place,
                share=this.share,
                job=job,
            )
            return await first.run()

        outcome = asyncio.run(run())
    if as_json:
        print_json({**outcome.summary, "run_dir": str(this.run_dir)})
    else:
        print_outcome(outcome.summary, outcome.status, this.run_dir)
    return outcome.exit_code


def _console(this: _Node, as_json: bool) -> Any:
    from rich.console import Console

    from paceline.observe.progress import Progress
    from paceline.observe.run_records import RunRecords
    from paceline_launcher.console.live_view import open_console

    console = open_console(Console(stderr=as_json), Progress(RunRecords.read(this.run_dir).metrics))
    names = ", ".join(_workers_here(this)) or "no worker"
    console.note(f"node 0 of {this.place.nodes}: Redis, controllers, {names} in {this.run_dir}")
    return console


def _resolved(host: str, wait_s: float) -> None:
    """Waits until the name of node 0 has an address: a cluster's name server learns of a new pod
    late. Raises BadInput."""
    import socket
    import time

    began, said = time.monotonic(), -10.0
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            waited = time.monotonic() - began
            if waited >= wait_s:
                raise BadInput(
                    f"MASTER_ADDR={host} has no address after {wait_s:g} s: {error}. Give --master HOST:PORT with an address of "
                    "node 0 that the other nodes reach"
                ) from None
            if waited - said >= 10.0:
                said = waited
                typer.echo(
                    f"waiting for an address of {host} ({waited:.0f} of {wait_s:g} s)", err=True
                )
            time.sleep(1.0)


def _other(this: _Node, wait_s: float) -> int:
    """A node other than node 0. Returns the exit status of the run."""
    from paceline_launcher.launch.nodes.job_file import node_directory
    from paceline_launcher.launch.nodes.meeting import Meeting
    from paceline_launcher.launch.nodes.other_node import OtherNode
    from paceline_launcher.launch.run_dir_lock import end_leftovers, locked

    def note(line: str) -> None:
        typer.echo(f"node {this.place.rank}: {line}")

    async def run() -> int:
        meeting = Meeting(this.place, this.run_dir, this.job, wait_s, note)
        return await OtherNode(meeting, this.share, this.run_dir, wait_s, note).run()

    _check_inputs(this.config)
    home = node_directory(this.run_dir, this.place.rank)
    with locked(home):
        if left := end_leftovers(home):
            note(f"ended {len(left)} processes that an earlier start left behind")
        return asyncio.run(run())


def _check_inputs(config: Config) -> None:
    """Raises BadInput if this node lacks what its workers read."""
    from paceline_launcher.preflight.inputs.input_checks import inputs
    from paceline_launcher.preflight.machine import own_packages, vllm

    checks = [*own_packages(), *vllm(config), *inputs(config)]
    if failed := [str(check) for check in checks if check.state == "fail"]:
        raise BadInput("\n".join(failed))
