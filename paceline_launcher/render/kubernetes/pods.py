"""Pods of Kubernetes: the parts that pods of every kind of job have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline_launcher.render.request import Document, RenderRequest, Secrets

CONFIG_MOUNT = "/etc/paceline"
RUN_FILE = f"{CONFIG_MOUNT}/run.toml"
TLS_MOUNT = "/etc/paceline-tls"
USER = 1000
"""Of the image."""
PART_OF = "app.kubernetes.io/part-of"
COMPONENT = "app.kubernetes.io/component"


@dataclass(frozen=True, slots=True)
class PodProcess:
    """What one pod runs, and what it needs."""

    name: str
    """Of the container."""
    command: Sequence[str]
    args: Sequence[str]
    cpus: int
    memory_gib: int
    gpus: int = 0
    secrets: Secrets = field(default_factory=dict)
    tensors: bool = False
    """It takes part in collectives: the host's network, RDMA and shared memory are for it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    pod_name: bool = False
    """It knows its pod's name as POD_NAME."""
    ports: Mapping[str, int] = field(default_factory=dict)
    probes: Mapping[str, Document] = field(default_factory=dict)
    farewell: str = ""
    """Shell text that runs before the container is ended."""


def labels(request: RenderRequest, component: str) -> dict[str, str]:
    return {PART_OF: request.name, COMPONENT: component}


def pod_spec(request: RenderRequest, process: PodProcess) -> Document:
    """Pod of one container with the run's configuration and storage."""
    options = request.options
    spec: Document = {"automountServiceAccountToken": False}
    if options.scheduler is not None:
        spec["schedulerName"] = options.scheduler
    if process.tensors and options.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    spec["securityContext"] = pod_security(request)
    spec["containers"] = [_container(request, process)]
    spec["volumes"] = _volumes(request, process)
    return spec


def pod_security(request: RenderRequest) -> Document:
    # Locked memory, which RDMA needs, is a right of root alone in a container. Files of the run are
    # private, so all of its processes are the same user then.
    user = 0 if request.options.rdma is not None else USER
    return {
        "runAsNonRoot": user != 0,
        "runAsUser": user,
        "fsGroup": USER,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security(*, lock_memory: bool = False) -> Document:
    capabilities: Document = {"drop": ["ALL"]}
    if lock_memory:
        capabilities["add"] = ["IPC_LOCK"]
    return {"allowPrivilegeEscalation": False, "capabilities": capabilities}


def _container(request: RenderRequest, process: PodProcess) -> Document:
    rdma = request.options.rdma if process.tensors else None
    found: Document = {
        "name": process.name,
        "image": request.options.image,
        "securityContext": container_security(lock_memory=rdma is not None),
        "command": list(process.command),
        "args": list(process.args),
        "env": _environment(request, process),
    }
    if process.ports:
        found["ports"] = [
            {"name": name, "containerPort": port} for name, port in process.ports.items()
        ]
    found |= process.probes
    if process.farewell:
        found["lifecycle"] = {"preStop": {"exec": {"command": ["sh", "-c", process.farewell]}}}
    found["resources"] = _resources(request, process)
    found["volumeMounts"] = [
        {"name": "config", "mountPath": CONFIG_MOUNT},
        *({"name": name, "mountPath": path} for name, path in _storage(request).items()),
    ]
    if request.config.auth.tls_cert:
        found["volumeMounts"].append({"name": "tls", "mountPath": TLS_MOUNT})
    if process.tensors:
        found["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})
    return found


def _environment(request: RenderRequest, process: PodProcess) -> list[Document]:
    found: list[Document] = []
    if process.pod_name:
        found.append({"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}})  # fmt: skip
    given = {**process.environment, **request.options.environment}
    found += [{"name": name, "value": value} for name, value in given.items()]
    for name, secret in process.secrets.items():
        reference: Document = {"name": request.options.secret, "key": secret.key}
        if secret.optional:
            reference["optional"] = True
        found.append({"name": name, "valueFrom": {"secretKeyRef": reference}})
    return found


def _resources(request: RenderRequest, process: PodProcess) -> Document:
    memory = f"{process.memory_gib}Gi"
    requests: Document = {"cpu": str(process.cpus), "memory": memory}
    limits: Document = {}
    if process.gpus:
        limits[request.options.gpu_resource] = process.gpus
    if request.options.rdma is not None and process.tensors:
        limits[request.options.rdma.resource] = request.options.rdma.count
    # A limit of such a resource is its request as well.
    return {"requests": requests} | ({"limits": limits} if limits else {})


def _storage(request: RenderRequest) -> dict[str, str]:
    """Mount paths by volume name."""
    found = {f"volume-{index}": one.path for index, one in enumerate(request.options.volumes)}
    return found if holds_run(request) else {"runs": "/runs", **found}


def holds_run(request: RenderRequest) -> bool:
    """Whether a volume that is there already has the run directory."""
    return any(volume.holds(request.run_dir) for volume in request.options.volumes)


def runs_claim(request: RenderRequest) -> str:
    """Name of the claim that is rendered for the run directory."""
    return f"{request.name}-runs"


def _volumes(request: RenderRequest, process: PodProcess) -> list[Document]:
    claims = {f"volume-{index}": one.name for index, one in enumerate(request.options.volumes)}
    if not holds_run(request):
        claims = {"runs": runs_claim(request), **claims}
    found: list[Document] = [
        {"name": "config", "configMap": {"name": f"{request.name}-config"}},
        *(
            {"name": name, "persistentVolumeClaim": {"claimName": claim}}
            for name, claim in claims.items()
        ),
    ]
    if request.config.auth.tls_cert:
        found.append({"name": "tls", "secret": {"secretName": f"{request.options.secret}-tls"}})
    if process.tensors:
        size = f"{request.options.shm_gib}Gi"
        found.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}})
    return found


def tls_settings(request: RenderRequest) -> dict[str, Any]:
    """Settings of [auth] under which pods find the certificates of the run."""
    auth = request.config.auth
    if auth.tls_cert is None:
        return {}
    found = {"tls_cert": f"{TLS_MOUNT}/tls.crt", "tls_key": f"{TLS_MOUNT}/tls.key"}
    return found | ({"tls_ca": f"{TLS_MOUNT}/ca.crt"} if auth.tls_ca is not None else {})


def rest_probes(request: RenderRequest) -> dict[str, Document]:
    """Probes of a process that serves REST. Without it, an open gRPC port is all that can be asked
    for."""
    if request.rest_port is None:
        opened = {"tcpSocket": {"port": "grpc"}}
        return {"readinessProbe": opened}
    scheme = {"scheme": "HTTPS"} if request.config.auth.tls_cert else {}

    def get(path: str) -> Document:
        return {"httpGet": {"path": path, "port": "rest", **scheme}}

    return {
        # Redis may still load its log, and the web framework is imported last.
        "startupProbe": {**get("/healthz"), "periodSeconds": 2, "failureThreshold": 150},
        "readinessProbe": {**get("/readyz"), "periodSeconds": 5},
        "livenessProbe": {**get("/healthz"), "periodSeconds": 10, "failureThreshold": 6},
    }
