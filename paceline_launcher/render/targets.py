"""Targets of `paceline render` by name, and the files that one of them makes of a run."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import BadInput
from paceline.worker_pools import POLICY, ROLLOUT, SCORER
from paceline_launcher.render.manifests import kubernetes, pytorchjob
from paceline_launcher.render.options import limit_minutes
from paceline_launcher.render.pai_dlc import pai_dlc
from paceline_launcher.render.request import RenderRequest
from paceline_launcher.render.templates import Templates, script_run_file

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


STOP_SPARE_S = 60
"""Slurm may signal a job a minute early."""


def slurm(request: RenderRequest) -> dict[str, str]:
    """One batch script, with `paceline node` on every node. Raises BadInput."""
    limit = request.options.time_limit
    stop_s = math.ceil(request.config.fleet.stop_s) + STOP_SPARE_S
    minutes = limit_minutes(limit)
    if minutes is not None and minutes * 60 <= stop_s:
        raise BadInput(
            f"--time-limit {limit}: the run is asked to stop {stop_s} s before its end "
            "(fleet.stop_s), so nothing would be trained. Give more"
        )
    for option in ("partition", "account"):
        if len((getattr(request.options, option) or "x").split()) != 1:
            raise BadInput(f"--{option}: a value of a Slurm option has no space")
    text = script_run_file(request.config, {"fleet": {"provider": "local"}}, with_token_file=True)
    secrets = request.controller_secrets()
    templates = Templates(request, target="slurm", run_toml=text, secrets=secrets, stop_s=stop_s)
    return {"job.sbatch": templates.text("slurm/job.sbatch")}


def ray(request: RenderRequest) -> dict[str, str]:
    """A job for `ray job submit` whose entrypoint has Redis and the controllers. Raises BadInput.

    submit.sh ──job──► head: start.sh = paceline node ──Ray──► an actor for each worker
    """
    request.check_workers_fit_nodes()
    gpus = {POLICY: 0, ROLLOUT: 0, SCORER: 0}
    for pool in request.pools:
        gpus[pool.role] = max(gpus[pool.role], pool.gpus)
    changes: dict[str, dict[str, Any]] = {
        "fleet": {"provider": "ray"},
        "ray": {"address": "auto", **{f"{role}_gpus": count for role, count in gpus.items()}},
        "rest": {"port": request.rest_port or 0},
    }
    # Workers are on other machines: what they need is in the environment there, and the token in
    # the run directory.
    elsewhere = request.worker_secrets()
    secrets = {n: s for n, s in request.controller_secrets().items() if n not in elsewhere}
    text = script_run_file(request.config, changes)
    templates = Templates(request, target="ray", run_toml=text, secrets=secrets)
    names = ("start.sh", "runtime-env.yaml", "submit.sh")
    return {name: templates.text(f"ray/{name}") for name in names}


TARGETS: dict[str, Callable[[RenderRequest], dict[str, str]]] = {
    "kubernetes": kubernetes,
    "pytorchjob": pytorchjob,
    "pai-dlc": pai_dlc,
    "ray": ray,
    "slurm": slurm,
}
