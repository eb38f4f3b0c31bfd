"""Kubernetes target: the manifests of a run, for `kubectl apply -k`."""

from __future__ import annotations

from typing import Any

from paceline.errors import BadInput
from paceline_launcher.render.kubernetes.control_plane import (
    addresses,
    controllers,
    end,
    redis,
    secrets,
)
from paceline_launcher.render.kubernetes.manifests import (
    NETWORK_COMMENT,
    STORAGE_COMMENT,
    config_map,
    disruption_budget,
    kustomization,
    namespace,
    network_policy,
    runs_storage,
)
from paceline_launcher.render.kubernetes.pods import holds_run, labels, tls_settings
from paceline_launcher.render.kubernetes.worker_pools import workers, workload, workload_settings
from paceline_launcher.render.request import Document, RenderRequest
from paceline_launcher.render.run_file import run_file
from paceline_launcher.render.yaml_text import yaml_text

USES = frozenset(
    {
        *("image", "gpus_per_node", "namespace", "secret", "run_dir", "volumes", "storage_class"),
        *("storage_gib", "environment", "rdma", "host_network", "node_cidr", "gpu_resource"),
        "scheduler",
        *("cpus", "memory_gib", "shm_gib"),
    }
)


def render(request: RenderRequest) -> dict[str, str]:
    """Files by name. Raises BadInput."""
    request.check_workers_fit_nodes()
    if request.options.host_network and request.options.node_cidr is None:
        raise BadInput(
            "--host-network: pods then have their nodes' addresses, which the NetworkPolicy must admit: "
            "give them as --node-cidr, such as 10.0.0.0/16"
        )
    files = {
        "namespace.yaml": _file(
            [namespace(request, "restricted")],
            "A pod with more rights than this profile allows is refused.",
        ),
        "config.yaml": _file(
            [config_map(request, _run_file(request))],
            "The run's configuration. Every process reads the same file; it contains no secret.",
        ),
    }
    if not holds_run(request):
        files["storage.yaml"] = _file(
            [runs_storage(request)],
            STORAGE_COMMENT,
        )
    if request.config.redis.url is None:
        files["redis.yaml"] = _file(
            redis(request),
            "The journal and the payloads. The append-only file is on a volume of its own: a restart loses "
            "nothing that\nwas acknowledged (with appendfsync everysec a power cut may lose a second).",
        )
    files["network.yaml"] = _file(
        [network_policy(request)],
        NETWORK_COMMENT,
    )
    files["rbac.yaml"] = _file(
        _access(request),
        "The leader's only permission: to read and change the number of replicas of the workers' workloads.",
    )
    files["controllers.yaml"] = _file(
        controllers(request),
        "A leader and hot standbys. Workers know all of them by stable names.",
    )
    for pool in request.pools:
        files[f"{pool.label}.yaml"] = _file(
            workers(request, pool, addresses(request)),
            f"Workers of the pool {pool.name}, of {pool.gpus} GPUs each. The leader changes replicas; a pod is "
            "its worker's name.\nBefore Kubernetes ends a pod, preStop lets the worker finish what it holds "
            "and leave.",
        )
    files["disruption.yaml"] = _file(
        _budgets(request), "A node that is emptied takes one pod of each kind at a time."
    )
    files["end.yaml"] = _file(
        end(request), "It ends with the run, and writes summary.json and the exported model."
    )
    files["kustomization.yaml"] = kustomization(request, list(files), secrets(request))
    return files


def _file(documents: list[Document], comment: str) -> str:
    return yaml_text(documents, comment)


def _run_file(request: RenderRequest) -> str:
    controller = {"host": "0.0.0.0", "port": request.grpc_port}
    changes: dict[str, dict[str, Any]] = {
        "fleet": {"provider": "kubernetes"},
        "kubernetes": {**workload_settings(request), "namespace": None},
        "controller": controller,
        "rest": {"host": None, "port": request.rest_port or 0},
        "auth": tls_settings(request),
        # These are the server's own settings, and it is not embedded here.
        "redis": {"appendfsync": "everysec", "maxmemory_mb": None},
    }
    return run_file(request.config, changes)


def _access(request: RenderRequest) -> list[Document]:
    account = f"{request.name}-controller"
    names: dict[str, list[str]] = {}
    for pool in request.pools:
        kind, name = workload(request, pool)
        names.setdefault(f"{kind}s/scale", []).append(name)
    rules = [
        {
            "apiGroups": ["apps"],
            "resources": [resource],
            "resourceNames": those,
            "verbs": ["get", "patch"],
        }
        for resource, those in names.items()
    ]
    role, group = f"{request.name}-scale", "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount", "name": account, "namespace": request.options.namespace}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account}},
        {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": {"name": role}, "rules": rules},
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": role},
            "roleRef": {"apiGroup": group, "kind": "Role", "name": role},
            "subjects": [subject],
        },
    ]


def _budgets(request: RenderRequest) -> list[Document]:
    components = ["controller", *(pool.label for pool in request.pools)]
    return [disruption_budget(f"{request.name}-{one}", labels(request, one)) for one in components]
