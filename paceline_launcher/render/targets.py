"""Targets of `paceline render` by name, and the files that one of them makes of a run."""

import os
from collections.abc import Callable
from pathlib import Path

from paceline.errors import BadInput
from paceline_launcher.render.manifests import kubernetes, pytorchjob
from paceline_launcher.render.pai_dlc import pai_dlc
from paceline_launcher.render.request import RenderRequest
from paceline_launcher.render.scripts import ray, slurm

TARGETS: dict[str, Callable[[RenderRequest], dict[str, str]]] = {
    "kubernetes": kubernetes,
    "pytorchjob": pytorchjob,
    "pai-dlc": pai_dlc,
    "ray": ray,
    "slurm": slurm,
}
_ALL = {"gpus_per_node", "run_dir", "nccl_env", "templates"}
_PODS = _ALL | {"image", "volume", "rdma", "cpus", "memory_gib", "shm_gib"}
_MANIFESTS = _PODS | {
    *("namespace", "secret", "storage_class", "storage_gib", "host_network", "gpu_resource"),
    "scheduler",
}
USES = {
    "kubernetes": _MANIFESTS | {"node_cidr"},
    "pytorchjob": _MANIFESTS | {"nodes"},
    "pai-dlc": _PODS
    | {"nodes", "workspace", "resource_quota", "job_type", "gpu_type", "time_limit"},
    "ray": _ALL,
    "slurm": _ALL | {"nodes", "cpus", "memory_gib", "partition", "account", "time_limit"},
}
"""Options that each target heeds."""


def rendered(target: str, request: RenderRequest) -> dict[str, str]:
    """Texts of the target's files, by name. Raises BadInput."""
    if target not in TARGETS:
        raise BadInput(f"--target {target}: choose {', '.join(TARGETS)}")
    for option in request.options.chosen():
        if option not in USES[target]:
            flag = "--" + option.replace("_", "-")
            raise BadInput(f"{flag} has no effect with --target {target}: remove it")
    if "image" in USES[target] and request.options.image is None:
        raise BadInput(
            f"--image is missing: --target {target} starts containers. "
            "deploy/containers/Dockerfile builds an image"
        )
    request.check()
    return TARGETS[target](request)


def write_files(files: dict[str, str], directory: Path, *, force: bool) -> list[Path]:
    """Writes all, or none if one exists and is not to be replaced. Raises BadInput."""
    paths = [directory / name for name in files]
    there = [str(path) for path in paths if path.exists()]
    if there and not force:
        raise BadInput(
            f"{', '.join(there)}: --force replaces them, and --out names another directory"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, files.values(), strict=True):
            # Beside it first: a reader never sees half a file.
            partial = path.with_name(f".{path.name}.{os.getpid()}")
            partial.write_text(text, encoding="utf-8")
            partial.chmod(0o755 if text.startswith("#!") else 0o644)
            partial.replace(path)
    except OSError as error:
        raise BadInput(f"{directory}: cannot be written: {error.strerror or error}") from None
    return paths
