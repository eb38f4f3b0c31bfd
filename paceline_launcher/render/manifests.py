"""Kubernetes targets: plain manifests (kubernetes), or a job of Kubeflow (pytorchjob)."""

from typing import Any

from paceline.errors import BadInput
from paceline.providers.kubernetes import KubernetesProvider
from paceline.redis.users import CONTROLLER, RULES
from paceline_launcher.render.request import Pool, RenderRequest, Secret, Secrets
from paceline_launcher.render.templates import Templates, run_file, with_changes

TLS_MOUNT = "/etc/paceline-tls"


def kubernetes(request: RenderRequest) -> dict[str, str]:
    """The manifests of a run, for `kubectl apply -k`. Raises BadInput."""
    request.check_workers_fit_nodes()
    if request.options.host_network and request.options.node_cidr is None:
        raise BadInput(
            "--host-network: pods then have their nodes' addresses, which the NetworkPolicy must "
            "admit: give them as --node-cidr, such as 10.0.0.0/16"
        )
    changes: dict[str, dict[str, Any]] = {
        "fleet": {"provider": "kubernetes"},
        "kubernetes": {**_workload_settings(request), "namespace": None},
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
        addresses=_addresses(request),
        workloads={pool.name: _workload(request, pool) for pool in request.pools},
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
    if request.config.redis.url is not None:
        changes["redis"] = {"appendfsync": "everysec", "maxmemory_mb": None}
    secrets: Secrets = request.controller_secrets()
    text = run_file(request.config, changes)
    templates = Templates(request, target="pytorchjob", run_toml=text, secrets=secrets)
    files = {}
    for folder, name in (
        *(("kubernetes", name) for name in ("namespace", "config", "storage", "network")),
        *(("pytorchjob", "job"), ("pytorchjob", "rest"), ("kubernetes", "disruption")),
    ):
        files[f"{name}.yaml"] = templates.text(f"{folder}/{name}.yaml")
    return _with_kustomization(files, templates)


def _with_kustomization(files: dict[str, str], templates: Templates) -> dict[str, str]:
    files = {name: text for name, text in files.items() if text.strip()}
    text = templates.text("kubernetes/kustomization.yaml", files=list(files))
    return {**files, "kustomization.yaml": text}


def _addresses(request: RenderRequest) -> str:
    name = request.name
    return ",".join(
        f"{name}-controller-{index}.{name}-controllers:{request.grpc_port}"
        for index in range(request.config.fleet.controllers)
    )


def _tls_settings(request: RenderRequest) -> dict[str, Any]:
    auth = request.config.auth
    if auth.tls_cert is None:
        return {}
    found = {"tls_cert": f"{TLS_MOUNT}/tls.crt", "tls_key": f"{TLS_MOUNT}/tls.key"}
    return found | ({"tls_ca": f"{TLS_MOUNT}/ca.crt"} if auth.tls_ca is not None else {})


def _workload_settings(request: RenderRequest) -> dict[str, str]:
    config = request.config.kubernetes
    default = type(config)()
    return {
        role: f"statefulset/{request.name}-{role}"
        for role in ("policy", "rollout", "scorer")
        if getattr(config, role) == getattr(default, role)
    }


def _workload(request: RenderRequest, pool: Pool) -> tuple[str, str]:
    """Kind and name of the workload whose replicas the leader changes."""
    config = with_changes(request.config, {"kubernetes": _workload_settings(request)})
    kind, _, name = KubernetesProvider(config.kubernetes).workload(pool.name).partition("/")
    return kind, name
