"""Options of a rendered run, which a scheduler needs and a configuration does not have."""

import math
import re
from dataclasses import dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Annotated

import typer

from paceline.errors import BadInput

DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_RESOURCE = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9][A-Za-z0-9_.-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_NAME = re.compile(r"TOKEN|PASSWORD|SECRET|CREDENTIAL|(^|_)KEY", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Volume:
    """Storage that every process of the run sees at ``path``."""

    name: str
    """A claim in Kubernetes; a data set's id on PAI-DLC."""
    path: str

    def holds(self, path: str) -> bool:
        return PurePosixPath(path).is_relative_to(self.path)


@dataclass(frozen=True, slots=True)
class Rdma:
    resource: str
    count: int


@dataclass(frozen=True, slots=True)
class Variable:
    name: str
    value: str


def parse_volume(text: str) -> Volume:
    """The volume NAME:PATH. Raises BadInput."""
    name, colon, path = text.partition(":")
    if not colon or not name or not path.startswith("/") or path.strip("/") == "":
        raise BadInput(f"--volume {text}: write NAME:/PATH, the absolute path in the container")
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", name):
        raise BadInput(f"--volume {text}: {name} is not the name of a claim or data set")
    return Volume(name, path.rstrip("/"))


def parse_variable(text: str) -> Variable:
    """The variable NAME=VALUE. Raises BadInput, also for names of secrets."""
    name, equals, value = text.partition("=")
    if not equals or not _VARIABLE.fullmatch(name) or any(ord(c) < 32 for c in value):
        raise BadInput(f"--nccl-env {text}: write NAME=VALUE, such as NCCL_SOCKET_IFNAME=eth0")
    if _SECRET_NAME.search(name):
        raise BadInput(
            f"--nccl-env {name}: rendered files contain no secrets. Put it into the secret of the "
            "run (--secret)"
        )
    return Variable(name, value)


def parse_rdma(text: str) -> Rdma:
    """The devices RESOURCE or RESOURCE=COUNT. Raises BadInput."""
    resource, equals, count = text.partition("=")
    if not _RESOURCE.fullmatch(resource) or (equals and not re.fullmatch(r"[1-9]\d{0,2}", count)):
        raise BadInput(
            f"--rdma {text}: write the resource of the device plugin, such as rdma/hca, or with a "
            "count, rdma/hca=8"
        )
    return Rdma(resource, int(count or 1))


def parse_image(text: str) -> str:
    """``text``. Raises BadInput for an image that is not the same tomorrow."""
    if re.search(r"\s", text) or not text:
        raise BadInput(f"--image {text!r}: write REGISTRY/NAME:TAG")
    tag = text.rpartition("/")[2].partition(":")[2]
    if "@sha256:" not in text and tag in ("", "latest"):
        raise BadInput(
            f"--image {text}: name a tag that does not move, or a digest. A restarted process "
            "could otherwise run another release than the rest of the run"
        )
    return text


def parse_label(text: str) -> str:
    """``text``. Raises BadInput if it is no DNS label."""
    if not DNS_LABEL.fullmatch(text):
        raise BadInput(
            f"{text!r} is no name for Kubernetes: use at most 63 lower-case letters, digits and "
            "'-', with no '-' at an end (--namespace, --secret, --storage-class)"
        )
    return text


def limit_minutes(text: str) -> int | None:
    """Minutes of Slurm's D-HH:MM:SS and its shorter forms; None for no limit. Raises BadInput."""
    if text.upper() in ("0", "UNLIMITED", "INFINITE"):
        return None
    long = re.fullmatch(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?", text)
    short = re.fullmatch(r"(?:(\d+):)?(\d+):(\d+)|(\d+)", text)
    if long:
        days, hours, minute, seconds = (int(part or 0) for part in long.groups())
    elif short:
        days = 0
        hours, minute, seconds = int(short[1] or 0), int(short[2] or short[4]), int(short[3] or 0)
    else:
        raise BadInput(f"--time-limit {text}: write D-HH:MM:SS, HH:MM:SS or minutes")
    return max(1, (days * 24 + hours) * 60 + minute + math.ceil(seconds / 60))


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

    def __post_init__(self) -> None:
        paths = [volume.path for volume in self.volume or ()]
        if len(set(paths)) < len(paths):
            raise BadInput("--volume: two volumes have the same path")

    def chosen(self) -> list[str]:
        return [f.name for f in fields(self) if getattr(self, f.name) != f.default]
