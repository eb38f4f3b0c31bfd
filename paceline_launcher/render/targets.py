"""Targets of `paceline render` by name, and the files that one of them makes of a run."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from paceline.errors import BadInput
from paceline.process.files import replace_file
from paceline.providers.kubernetes import KubernetesProvider
from paceline.redis.users import CONTROLLER, RULES
from paceline.worker_pools import POLICY, ROLLOUT, SCORER
from paceline_launcher.render.options import limit_minutes
from paceline_launcher.render.request import RenderRequest, Secret
from paceline_launcher.render.templates import Templates, run_file, with_changes

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
TLS_MOUNT = "/etc/paceline-tls"
STOP_SPARE_S = 60
"""Slurm may signal a job a minute early."""


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
    """Writes all, or none if one exists and is not to be replaced. Raises BadInput and OSError."""
    paths = [directory / name for name in files]
    there = [str(path) for path in paths if path.exists()]
    if there and not force:
        raise BadInput(
            f"{', '.join(there)}: --force replaces them, and --out names another directory"
        )
    directory.mkdir(parents=True, exist_ok=True)
    for path, text in zip(paths, files.values(), strict=True):
        replace_file(path, text.encode())
        path.chmod(0o755 if text.startswith("#!") else 0o644)
    return paths


def kubernetes(request: RenderRequest) -> dict[str, str]:
    """The manifests of a run, for `kubectl apply -k`. Raises BadInput."""
    request.check_workers_fit_nodes()
    if request.options.host_network and request.options.node_cidr is None:
        raise BadInput(
            "--host-network: pods then have their nodes' addresses, which the NetworkPolicy must "
            "admit: give them as --node-cidr, such as 10.0.0.0/16"
        )
    name, given = request.name, request.config.kubernetes
    workloads = {
        role: f"statefulset/{name}-{role}"
        for role in ("policy", "rollout", "scorer")
        if getattr(given, role) == getattr(type(given)(), role)
    }
    provider = KubernetesProvider(with_changes(request.config, "kubernetes", workloads).kubernetes)
    changes: dict[str, dict[str, Any]] = {
        "fleet": {"provider": "kubernetes"},
        "kubernetes": workloads,
        "controller": {"host": "0.0.0.0", "port": request.grpc_port},
        "rest": {"host": None, "port": request.rest_port or 0},
        "auth": _tls_settings(request),
        # These are the server's own settings, and it is not embedded here.
        "redis": {"appendfsync": "everysec", "maxmemory_mb": None},
    }
    secrets = request.controller_secrets()
    if request.config.redis.url is None:
        secrets["REDIS_PASSWORD"] = Secret("redis-password")
    templates = Templates(
        request,
        target="kubernetes",
        run_toml=run_file(request.config, changes),
        secrets=secrets,
        addresses=",".join(
            f"{name}-controller-{index}.{name}-controllers:{request.grpc_port}"
            for index in range(request.config.fleet.controllers)
        ),
        # Kind and name of the workload whose replicas the leader changes.
        workloads={
            pool.name: tuple(provider.workload(pool.name).split("/", 1)) for pool in request.pools
        },
        redis_rules=RULES[CONTROLLER],
    )
    names = ("namespace", "config", "storage", "redis", "network", "rbac", "controllers")
    files = {f"{name}.yaml": templates.text(f"kubernetes/{name}.yaml") for name in names}
    for pool in request.pools:
        files[f"{pool.label}.yaml"] = templates.text("kubernetes/workers.yaml", pool=pool)
    for name in ("disruption", "end"):
        files[f"{name}.yaml"] = templates.text(f"kubernetes/{name}.yaml")
    return _with_kustomization(files, templates)


def pytorchjob(request: RenderRequest) -> dict[str, str]:
    """A PyTorchJob whose every pod runs `paceline node`. Raises BadInput."""
    changes: dict[str, dict[str, Any]] = {
        "fleet": {"provider": "local"},
        "auth": _tls_settings(request),
    }
    if request.rest_port is not None:
        changes["rest"] = {"host": "0.0.0.0", "port": request.rest_port}
    templates = _job(request, "pytorchjob", changes)
    folders = dict.fromkeys(("namespace", "config", "storage", "network"), "kubernetes")
    folders |= {"job": "pytorchjob", "rest": "pytorchjob", "disruption": "kubernetes"}
    files = {f"{name}.yaml": templates.text(f"{at}/{name}.yaml") for name, at in folders.items()}
    return _with_kustomization(files, templates)


def _with_kustomization(files: dict[str, str], templates: Templates) -> dict[str, str]:
    files = {name: text for name, text in files.items() if text.strip()}
    text = templates.text("kubernetes/kustomization.yaml", files=list(files))
    return {**files, "kustomization.yaml": text}


def _tls_settings(request: RenderRequest) -> dict[str, Any]:
    auth = request.config.auth
    if auth.tls_cert is None:
        return {}
    found = {"tls_cert": f"{TLS_MOUNT}/tls.crt", "tls_key": f"{TLS_MOUNT}/tls.key"}
    return found | ({"tls_ca": f"{TLS_MOUNT}/ca.crt"} if auth.tls_ca is not None else {})


def _job(
    request: RenderRequest, target: str, changes: dict[str, dict[str, Any]], **context: Any
) -> Templates:
    """Templates of a target whose files have the run's settings within."""
    text = run_file(request.config, changes, with_token_file=target == "slurm")
    known = {"secrets": request.controller_secrets(), "run_toml": text, "target": target}
    return Templates(request, **known | context)


def pai_dlc(request: RenderRequest) -> dict[str, str]:
    """The job as JSON. Raises BadInput."""
    options, pytorch = request.options, request.options.job_type == "pytorch"
    if options.job_type not in ("custom", "pytorch"):
        raise BadInput(f"--job-type {options.job_type}: choose custom or pytorch")
    for name, value in (
        ("--workspace", options.workspace),
        ("--resource-quota", options.resource_quota),
    ):
        if value is None:
            raise BadInput(f"{name} is missing: the console of PAI shows its ID")
    if not pytorch:
        if options.nodes is not None:
            raise BadInput(
                "--nodes: a custom job has one pod for each worker. Use --job-type pytorch"
            )
        request.check_workers_fit_nodes()
    if not request.holds_run:
        raise BadInput(
            f"--volume: no data set holds the run directory {request.run_dir}, which all pods "
            "share. Mount one with --volume ID:/PATH, and give --run-dir a path in it"
        )
    changes: dict[str, dict[str, Any]] = {
        "fleet": {"provider": "local" if pytorch else "none"},
        "rest": {"port": request.rest_port or 0},
    }
    templates = _job(request, "pai-dlc", changes, minutes=limit_minutes(options.time_limit))
    document = templates.text(
        "pai-dlc/job.yaml",
        command=lambda pool: json.dumps(templates.text("pai-dlc/pod.sh", pool=pool)),
    )
    text = json.dumps(yaml.safe_load(document), indent=2, ensure_ascii=False)
    return {"job.json": f"{text}\n"}


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
    templates = _job(request, "slurm", {"fleet": {"provider": "local"}}, stop_s=stop_s)
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
    templates = _job(request, "ray", changes, secrets=secrets)
    names = ("start.sh", "runtime-env.yaml", "submit.sh")
    return {name: templates.text(f"ray/{name}") for name in names}


TARGETS: dict[str, Callable[[RenderRequest], dict[str, str]]] = {
    "kubernetes": kubernetes,
    "pytorchjob": pytorchjob,
    "pai-dlc": pai_dlc,
    "ray": ray,
    "slurm": slurm,
}
