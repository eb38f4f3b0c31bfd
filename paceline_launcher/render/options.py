"""Options of a rendered run: what a scheduler must be told and a configuration does not have."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

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
        """Whether ``path`` is in it."""
        return PurePosixPath(path).is_relative_to(self.path)


@dataclass(frozen=True, slots=True)
class Rdma:
    """A device plugin's resource, such as rdma/hca."""

    resource: str
    count: int


@dataclass(frozen=True, slots=True)
class RenderOptions:
    image: str | None = None
    """Container image, with a tag that does not move or a digest."""
    gpus_per_node: int | None = None
    """None for a run on CPUs (model.device = "cpu")."""
    nodes: int | None = None
    """Default: as many as the fleet's GPUs need."""
    namespace: str = "paceline"
    secret: str = "paceline"
    """Secret of the namespace: its keys token and redis-password, or redis-url for a server of
    one's own."""
    run_dir: str | None = None
    """Default: /runs/NAME in containers, runs/NAME on hosts."""
    volumes: tuple[Volume, ...] = ()
    storage_class: str | None = None
    storage_gib: int = 50
    """Of the volume for checkpoints and run files, if no given one holds the run directory."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of every process, for NCCL."""
    rdma: Rdma | None = None
    host_network: bool = False
    node_cidr: str | None = None
    """Addresses of the nodes, which pods on the host network have."""
    scheduler: str | None = None
    """Of Kubernetes, such as volcano."""
    gpu_resource: str = "nvidia.com/gpu"
    cpus: int = 4
    """Cores for each GPU of a process, or for a process without GPUs."""
    memory_gib: int = 16
    """Memory for each GPU of a process, or for a process without GPUs."""
    shm_gib: int = 2
    """Shared memory of a container."""
    workspace: str | None = None
    """On PAI-DLC."""
    quota: str | None = None
    """Resource quota on PAI-DLC."""
    job_type: str = "custom"
    """On PAI-DLC: custom (one kind of pod for each role) or pytorch."""
    gpu_type: str | None = None
    """On PAI-DLC."""
    partition: str | None = None
    """On Slurm."""
    account: str | None = None
    """On Slurm."""
    time_limit: str = "7-00:00:00"
    """On Slurm and PAI-DLC, as Slurm writes it."""


def parse_volumes(texts: Sequence[str]) -> tuple[Volume, ...]:
    """NAME:PATH each. Raises BadInput."""
    found = []
    for text in texts:
        name, colon, path = text.partition(":")
        if not colon or not name or not path.startswith("/") or path.strip("/") == "":
            raise BadInput(f"--volume {text}: write NAME:/PATH, the absolute path in the container")
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", name):
            raise BadInput(f"--volume {text}: {name} is not the name of a claim or data set")
        found.append(Volume(name, path.rstrip("/")))
    if len({volume.path for volume in found}) < len(found):
        raise BadInput("--volume: two volumes have the same path")
    return tuple(found)


def parse_environment(texts: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE each. Raises BadInput, also for names of secrets: rendered files contain none."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not _VARIABLE.fullmatch(name) or any(ord(c) < 32 for c in value):
            raise BadInput(f"--nccl-env {text}: write NAME=VALUE, such as NCCL_SOCKET_IFNAME=eth0")
        if _SECRET_NAME.search(name):
            raise BadInput(
                f"--nccl-env {name}: rendered files contain no secrets. Put it into the secret of the "
                "run (--secret)"
            )
        found[name] = value
    return found


def parse_rdma(text: str) -> Rdma:
    """RESOURCE or RESOURCE=COUNT. Raises BadInput."""
    resource, equals, count = text.partition("=")
    if not _RESOURCE.fullmatch(resource) or (equals and not re.fullmatch(r"[1-9]\d{0,2}", count)):
        raise BadInput(
            f"--rdma {text}: write the resource of the device plugin, such as rdma/hca, or with a "
            "count, rdma/hca=8"
        )
    return Rdma(resource, int(count or 1))


def check_image(image: str) -> None:
    """Raises BadInput for an image that is not the same tomorrow."""
    if re.search(r"\s", image) or not image:
        raise BadInput(f"--image {image!r}: write REGISTRY/NAME:TAG")
    name = image.rpartition("/")[2]
    tag = name.partition(":")[2]
    if "@sha256:" not in image and tag in ("", "latest"):
        raise BadInput(
            f"--image {image}: name a tag that does not move, or a digest. A restarted process could "
            "otherwise run another release than the rest of the run"
        )
