"""``paceline render``: files that start a run on a scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.errors import BadInput
from paceline_launcher.cli.common import ConfigArgument, JsonOption, SetOption, print_json


def _targets() -> list[str]:
    from paceline_launcher.render.targets import TARGETS

    return list(TARGETS)


def _whole(number: int | None, least: int, flag: str) -> int | None:
    if number is not None and number < least:
        raise BadInput(f"{flag} {number}: it is at least {least}")
    return number


def render(
    config: ConfigArgument,
    target: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="kubernetes, pytorchjob, pai-dlc, ray or slurm.",
            autocompletion=_targets,
        ),
    ],
    out: Annotated[
        str,
        typer.Option(
            metavar="DIR",
            help="Directory of the files; - for standard output. Default: rendered/TARGET.",
        ),
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the files and write none.")
    ] = False,
    image: Annotated[
        str | None,
        typer.Option(metavar="IMAGE", help="Container image, with a tag that does not move."),
    ] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(metavar="N", help='GPUs of a node. Left out only with model.device = "cpu".'),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Nodes of the job. Default: as many as the fleet's GPUs need."
        ),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(metavar="NAME", help="Kubernetes namespace. Default: paceline.")
    ] = None,
    secret: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Secret of the namespace. Default: paceline."),
    ] = None,
    run_dir: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Run directory as the processes see it. Default: /runs/NAME in containers, runs/NAME on hosts.",
        ),
    ] = None,
    volume: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:PATH",
            help="Mount a claim (on PAI-DLC: a data set) in every container; may be repeated. One that holds the run "
            "directory replaces the volume that is rendered for it.",
        ),
    ] = None,
    storage_class: Annotated[
        str | None, typer.Option(metavar="NAME", help="Storage class of rendered claims.")
    ] = None,
    storage_gib: Annotated[
        int | None, typer.Option(metavar="N", help="Size of the claim for runs. Default: 50.")
    ] = None,
    nccl_env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Environment variable of all workers, such as NCCL_SOCKET_IFNAME=eth0; may be repeated.",
        ),
    ] = None,
    rdma: Annotated[
        str | None,
        typer.Option(
            metavar="RESOURCE[=N]", help="RDMA devices of a worker's container, such as rdma/hca=1."
        ),
    ] = None,
    host_network: Annotated[
        bool, typer.Option("--host-network", help="Workers use the network of their node.")
    ] = False,
    node_cidr: Annotated[
        str | None,
        typer.Option(metavar="CIDR", help="Addresses of the nodes, for --host-network."),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Scheduler of Kubernetes, such as volcano."),
    ] = None,
    gpu_resource: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Resource of a GPU. Default: nvidia.com/gpu."),
    ] = None,
    cpus: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Cores for each GPU, or for a worker without GPUs. Default: 4."
        ),
    ] = None,
    memory_gib: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Memory for each GPU, or for a worker without GPUs. Default: 16."
        ),
    ] = None,
    shm_gib: Annotated[
        int | None,
        typer.Option(metavar="N", help="Shared memory of a worker's container. Default: 2."),
    ] = None,
    workspace: Annotated[
        str | None, typer.Option(metavar="ID", help="Workspace on PAI-DLC.")
    ] = None,
    resource_quota: Annotated[
        str | None, typer.Option(metavar="ID", help="Resource quota on PAI-DLC.")
    ] = None,
    job_type: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="On PAI-DLC: custom, with a kind of pod for each role, or pytorch. Default: custom.",
        ),
    ] = None,
    gpu_type: Annotated[
        str | None, typer.Option(metavar="NAME", help="Kind of GPU on PAI-DLC.")
    ] = None,
    partition: Annotated[str | None, typer.Option(metavar="NAME", help="Slurm partition.")] = None,
    account: Annotated[str | None, typer.Option(metavar="NAME", help="Slurm account.")] = None,
    time_limit: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="Time limit of a job on Slurm or PAI-DLC. Default: 7-00:00:00."
        ),
    ] = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the files that start a run on Kubernetes, as a PyTorchJob, on PAI-DLC, Ray or Slurm.

    Counts, names and resources follow from the configuration; the options are what it does not say.
    Secrets are in none of the files. docs/clusters.md shows the commands that use them.

    Example: paceline render run.toml --target kubernetes --image registry/paceline:0.1.0
    --gpus-per-node 8

    Example: paceline render run.toml --target pytorchjob --image registry/paceline:0.1.0
    --gpus-per-node 8 --out job

    Example: paceline render run.toml --target slurm --gpus-per-node 8 --partition gpu
    """
    from paceline.config.load import load_config
    from paceline_launcher.render.options import (
        RenderOptions,
        parse_environment,
        parse_rdma,
        parse_volumes,
    )
    from paceline_launcher.render.request import RenderRequest, valid_label
    from paceline_launcher.render.targets import rendered, write_files

    given: dict[str, Any] = {
        "image": image,
        "gpus_per_node": _whole(gpus_per_node, 1, "--gpus-per-node"),
        "nodes": _whole(nodes, 1, "--nodes"),
        "namespace": namespace and valid_label(namespace, "--namespace"),
        "secret": secret and valid_label(secret, "--secret"),
        "run_dir": run_dir,
        "volumes": parse_volumes(volume) if volume else None,
        "storage_class": storage_class and valid_label(storage_class, "--storage-class"),
        "storage_gib": _whole(storage_gib, 1, "--storage-gib"),
        "environment": parse_environment(nccl_env) if nccl_env else None,
        "rdma": parse_rdma(rdma) if rdma else None,
        "host_network": host_network or None,
        "node_cidr": node_cidr,
        "scheduler": scheduler,
        "gpu_resource": gpu_resource,
        "cpus": _whole(cpus, 1, "--cpus"),
        "memory_gib": _whole(memory_gib, 1, "--memory-gib"),
        "shm_gib": _whole(shm_gib, 1, "--shm-gib"),
        "workspace": workspace,
        "quota": resource_quota,
        "job_type": job_type,
        "gpu_type": gpu_type,
        "partition": partition,
        "account": account,
        "time_limit": time_limit,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    settings = load_config(config, overrides or ())
    files = rendered(target, RenderRequest(settings, RenderOptions(**chosen)), chosen)
    if dry_run or out == "-":
        if as_json:
            print_json({"target": target, "written": None, "files": files})
        else:
            typer.echo("\n".join(f"# ---- {name}\n{text}" for name, text in files.items()), nl=False)  # fmt: skip
        return
    paths = write_files(files, Path(out or f"rendered/{target}"), force=force)
    if as_json:
        print_json({"target": target, "written": [str(path) for path in paths]})
        return
    for path in paths:
        typer.echo(f"wrote {path}")
    typer.echo(f"next: docs/clusters.md, section {target}")
