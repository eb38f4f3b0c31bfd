"""Options of a rendered run, which a scheduler needs and a configuration does not have."""

import math
import re
from dataclasses import dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

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


def _option(metavar: str, text: str, *flag: str, **more: Any) -> Any:
    return typer.Option(*flag, metavar=metavar, help=text, **more)


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """Options of ``paceline render``; ``targets.USES`` has those of each target."""

    image: Annotated[
        str | None,
        _option("IMAGE", "Container image, with a tag that does not move.", parser=parse_image),
    ] = None
    gpus_per_node: Annotated[
        int | None, _option("N", 'GPUs of a node. Left out only with model.device = "cpu".', min=1)
    ] = None
    nodes: Annotated[
        int | None,
        _option("N", "Nodes of the job. Default: as many as the fleet's GPUs need.", min=1),
    ] = None
    namespace: Annotated[str, _option("NAME", "Kubernetes namespace.", parser=parse_label)] = (
        "paceline"
    )
    secret: Annotated[str, _option("NAME", "Secret of the namespace.", parser=parse_label)] = (
        "paceline"
    )
    """The secret has the keys token and redis-password, or redis-url for a user's Redis."""
    run_dir: Annotated[
        str | None,
        _option(
            "PATH",
            "Run directory as the processes see it. Default: /runs/NAME in containers, runs/NAME "
            "on hosts.",
        ),
    ] = None
    volume: Annotated[
        list[Volume] | None,
        _option(
            "NAME:PATH",
            "Mount a claim (on PAI-DLC: a data set) in every container; may be repeated. One that "
            "holds the run directory replaces the volume that is rendered for it.",
            parser=parse_volume,
        ),
    ] = None
    storage_class: Annotated[
        str | None, _option("NAME", "Storage class of rendered claims.", parser=parse_label)
    ] = None
    storage_gib: Annotated[int, _option("N", "Size of the claim for runs.", min=1)] = 50
    nccl_env: Annotated[
        list[Variable] | None,
        _option(
            "NAME=VALUE",
            "Environment variable of all workers, such as NCCL_SOCKET_IFNAME=eth0; may be "
            "repeated.",
            parser=parse_variable,
        ),
    ] = None
    rdma: Annotated[
        Rdma | None,
        _option(
            "RESOURCE[=N]",
            "RDMA devices of a worker's container, such as rdma/hca=1.",
            parser=parse_rdma,
        ),
    ] = None
    host_network: Annotated[
        bool, typer.Option("--host-network", help="Workers use the network of their node.")
    ] = False
    node_cidr: Annotated[
        str | None, _option("CIDR", "Addresses of the nodes, for --host-network.")
    ] = None
    scheduler: Annotated[
        str | None, _option("NAME", "Scheduler of Kubernetes, such as volcano.")
    ] = None
    gpu_resource: Annotated[str, _option("NAME", "Resource of a GPU.")] = "nvidia.com/gpu"
    cpus: Annotated[
        int, _option("N", "Cores for each GPU, or for a worker without GPUs.", min=1)
    ] = 4
    memory_gib: Annotated[
        int, _option("N", "Memory for each GPU, or for a worker without GPUs.", min=1)
    ] = 16
    shm_gib: Annotated[int, _option("N", "Shared memory of a worker's container.", min=1)] = 2
    workspace: Annotated[str | None, _option("ID", "Workspace on PAI-DLC.")] = None
    resource_quota: Annotated[str | None, _option("ID", "Resource quota on PAI-DLC.")] = None
    job_type: Annotated[
        str, _option("TYPE", "On PAI-DLC: custom, with a kind of pod for each role, or pytorch.")
    ] = "custom"
    gpu_type: Annotated[str | None, _option("NAME", "Kind of GPU on PAI-DLC.")] = None
    partition: Annotated[str | None, _option("NAME", "Slurm partition.")] = None
    account: Annotated[str | None, _option("NAME", "Slurm account.")] = None
    time_limit: Annotated[
        str, _option("TIME", "Time limit of a job on Slurm or PAI-DLC.", parser=parse_time_limit)
    ] = "7-00:00:00"
    templates: Annotated[
        Path | None,
        _option(
            "DIR",
            "Directory of edited templates: a file there replaces the one of the same name in "
            "paceline_launcher/render/templates.",
            exists=True,
            file_okay=False,
        ),
    ] = None

    def __post_init__(self) -> None:
        paths = [volume.path for volume in self.volume or ()]
        if len(set(paths)) < len(paths):
            raise BadInput("--volume: two volumes have the same path")

    def chosen(self) -> list[str]:
        return [f.name for f in fields(self) if getattr(self, f.name) != f.default]
