"""Options of a rendered run, which a scheduler needs and a configuration does not have."""

import math
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import BadInput

DNS_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_VOLUME = r"([a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?):(/.*[^/])/*"
_VARIABLE = r"([A-Za-z_][A-Za-z0-9_]*)=([^\x00-\x1f]*)"
_RDMA = r"((?:[a-z0-9.-]+/)?[A-Za-z0-9][A-Za-z0-9_.-]*)(?:=([1-9]\d{0,2}))?"
_SECRET_NAME = re.compile(r"TOKEN|PASSWORD|SECRET|CREDENTIAL|(^|_)KEY", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Volume:
    """Storage that every process of the run sees at ``path``."""

    name: str
    """A claim in Kubernetes; a data set's id on PAI-DLC."""
    path: str


@dataclass(frozen=True, slots=True)
class Rdma:
    resource: str
    count: int


@dataclass(frozen=True, slots=True)
class Variable:
    name: str
    value: str


def _matched(pattern: str, option: str, text: str, remedy: str) -> re.Match[str]:
    found = re.fullmatch(pattern, text)
    if found is None:
        raise BadInput(f"{option} {text}: {remedy}")
    return found


def parse_volume(text: str) -> Volume:
    """The volume NAME:PATH. Raises BadInput."""
    remedy = "write NAME:/PATH, a claim or data set and the absolute path in the container"
    found = _matched(_VOLUME, "--volume", text, remedy)
    return Volume(found[1], found[2])


def parse_variable(text: str) -> Variable:
    """The variable NAME=VALUE. Raises BadInput, also for names of secrets."""
    remedy = "write NAME=VALUE, such as NCCL_SOCKET_IFNAME=eth0"
    found = _matched(_VARIABLE, "--nccl-env", text, remedy)
    if _SECRET_NAME.search(found[1]):
        raise BadInput(
            f"--nccl-env {found[1]}: rendered files contain no secrets. Put it into the secret of "
            "the run (--secret)"
        )
    return Variable(found[1], found[2])


def parse_rdma(text: str) -> Rdma:
    """The devices RESOURCE or RESOURCE=COUNT. Raises BadInput."""
    remedy = "write the resource of the device plugin, such as rdma/hca, or rdma/hca=8"
    found = _matched(_RDMA, "--rdma", text, remedy)
    return Rdma(found[1], int(found[2] or 1))


def parse_image(text: str) -> str:
    """``text``. Raises BadInput for an image that is not the same tomorrow."""
    _matched(r"\S+", "--image", text, "write REGISTRY/NAME:TAG")
    tag = text.rpartition("/")[2].partition(":")[2]
    if "@sha256:" not in text and tag in ("", "latest"):
        raise BadInput(
            f"--image {text}: name a tag that does not move, or a digest. A restarted process "
            "could otherwise run another release than the rest of the run"
        )
    return text


def parse_label(text: str) -> str:
    """``text``. Raises BadInput if it is no DNS label."""
    remedy = "use at most 63 lower-case letters, digits and '-', with no '-' at an end"
    _matched(DNS_LABEL, "--namespace, --secret or --storage-class", text, remedy)
    return text


def limit_minutes(text: str) -> int | None:
    """Minutes of Slurm's D-HH:MM:SS and its shorter forms; None for no limit. Raises BadInput."""
    if text.upper() in ("0", "UNLIMITED", "INFINITE"):
        return None
    pattern = r"(?:\d+-)?\d+(?::\d+){0,2}"
    _matched(pattern, "--time-limit", text, "write D-HH:MM:SS, HH:MM:SS or minutes")
    days, dash, rest = text.rpartition("-")
    # Alone and before seconds there are minutes, after days and before minutes there are hours.
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    seconds = sum(part * unit for part, unit in zip(parts, units, strict=False))
    return max(1, int(days or 0) * 1440 + math.ceil(seconds / 60))


def parse_time_limit(text: str) -> str:
    limit_minutes(text)
    return text


Named = Annotated[str, typer.Option(parser=parse_label)]
Count = Annotated[int, typer.Option(min=1)]
Optional = Annotated[int | None, typer.Option(min=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderOptions:
    """Options of ``paceline render``; ``targets.USES`` has those of each target. The secret has the
    keys token and redis-password, or redis-url for a user's Redis.

    Args:
        image IMAGE: Container image, with a tag that does not move.
        gpus_per_node N: GPUs of a node. Left out only with model.device = "cpu".
        nodes N: Nodes of the job. Default: as many as the fleet's GPUs need.
        namespace NAME: Kubernetes namespace.
        secret NAME: Secret of the namespace.
        run_dir PATH: Run directory as the processes see it. Default: /runs/NAME in containers,
            runs/NAME on hosts.
        volume NAME:PATH: Mount a claim (on PAI-DLC: a data set) in every container; may be
            repeated. One that holds the run directory replaces the volume that is rendered for it.
        storage_class NAME: Storage class of rendered claims.
        storage_gib N: Size of the claim for runs.
        nccl_env NAME=VALUE: Environment variable of all workers, such as NCCL_SOCKET_IFNAME=eth0;
            may be repeated.
        rdma RESOURCE[=N]: RDMA devices of a worker's container, such as rdma/hca=1.
        host_network: Workers use the network of their node.
        node_cidr CIDR: Addresses of the nodes, for --host-network.
        scheduler NAME: Scheduler of Kubernetes, such as volcano.
        gpu_resource NAME: Resource of a GPU.
        cpus N: Cores for each GPU, or for a worker without GPUs.
        memory_gib N: Memory for each GPU, or for a worker without GPUs.
        shm_gib N: Shared memory of a worker's container.
        workspace ID: Workspace on PAI-DLC.
        resource_quota ID: Resource quota on PAI-DLC.
        job_type TYPE: On PAI-DLC: custom, with a kind of pod for each role, or pytorch.
        gpu_type NAME: Kind of GPU on PAI-DLC.
        partition NAME: Slurm partition.
        account NAME: Slurm account.
        time_limit TIME: Time limit of a job on Slurm or PAI-DLC.
        templates DIR: Directory of edited templates: a file there replaces the one of the same name
            in paceline_launcher/render/templates.
    """

    image: Annotated[str | None, typer.Option(parser=parse_image)] = None
    gpus_per_node: Optional = None
    nodes: Optional = None
    namespace: Named = "paceline"
    secret: Named = "paceline"
    run_dir: str | None = None
    volume: Annotated[list[Volume] | None, typer.Option(parser=parse_volume)] = None
    storage_class: Annotated[str | None, typer.Option(parser=parse_label)] = None
    storage_gib: Count = 50
    nccl_env: Annotated[list[Variable] | None, typer.Option(parser=parse_variable)] = None
    rdma: Annotated[Rdma | None, typer.Option(parser=parse_rdma)] = None
    host_network: bool = False
    node_cidr: str | None = None
    scheduler: str | None = None
    gpu_resource: str = "nvidia.com/gpu"
    cpus: Count = 4
    memory_gib: Count = 16
    shm_gib: Count = 2
    workspace: str | None = None
    resource_quota: str | None = None
    job_type: str = "custom"
    gpu_type: str | None = None
    partition: str | None = None
    account: str | None = None
    time_limit: Annotated[str, typer.Option(parser=parse_time_limit)] = "7-00:00:00"
    templates: Annotated[Path | None, typer.Option(exists=True, file_okay=False)] = None

    def chosen(self) -> list[str]:
        return [f.name for f in fields(self) if getattr(self, f.name) != f.default]
