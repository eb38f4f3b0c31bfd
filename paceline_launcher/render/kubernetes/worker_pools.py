"""Worker pools on Kubernetes: a StatefulSet or Deployment each, whose replicas the leader changes."""

from __future__ import annotations

import math

from paceline.providers.kubernetes import KubernetesProvider
from paceline_launcher.render.kubernetes.manifests import service
from paceline_launcher.render.kubernetes.pods import (
    RUN_FILE,
    TLS_MOUNT,
    PodProcess,
    labels,
    pod_spec,
)
from paceline_launcher.render.request import Document, Pool, RenderRequest
from paceline_launcher.render.run_file import with_changes

LEAVE_S = 90
"""For the open step of a policy replica, beside the time that a rollout worker has to finish its
tasks."""
SPARE_S = 30
"""Between the end of the farewell and SIGKILL."""


def workload_settings(request: RenderRequest) -> dict[str, str]:
    """Settings of [kubernetes]: the workloads' names are the run's, unless they were chosen."""
    config = request.config.kubernetes
    default = type(config)()
    return {
        role: f"statefulset/{request.name}-{role}"
        for role in ("policy", "rollout", "scorer")
        if getattr(config, role) == getattr(default, role)
    }


def workload(request: RenderRequest, pool: Pool) -> tuple[str, str]:
    """Kind (statefulset or deployment) and name."""
    config = with_changes(request.config, {"kubernetes": workload_settings(request)})
    kind, _, name = KubernetesProvider(config.kubernetes).workload(pool.name).partition("/")
    return kind, name


def workers(request: RenderRequest, pool: Pool, addresses: str) -> list[Document]:
    """Manifests of one pool. ``addresses``: of the controllers."""
    kind, name = workload(request, pool)
    selector = labels(request, pool.label)
    leave_s = math.ceil(request.config.fleet.drain_s) + LEAVE_S
    scorer = [f"--scorer={pool.scorer}"] if pool.scorer else []
    process = PodProcess(
        name=pool.role,
        command=["tini", "--", "paceline"],
        args=[
            *(pool.role, RUN_FILE, *scorer),
            *("--controllers=$(CONTROLLERS)", "--id=$(POD_NAME)", f"--run-dir={request.run_dir}"),
        ],
        cpus=pool.cpus,
        memory_gib=pool.memory_gib,
        gpus=pool.gpus,
        tensors=True,
        secrets=request.worker_secrets(),
        environment={"CONTROLLERS": addresses},
        pod_name=True,
        farewell=f'paceline drain "$POD_NAME" --replace --wait {leave_s} --controllers "$CONTROLLERS"'
        + _verified(request),
    )
    pod = {"terminationGracePeriodSeconds": leave_s + SPARE_S, **pod_spec(request, process)}
    spec: Document = {
        "replicas": pool.count,
        "selector": {"matchLabels": selector},
        "template": {"metadata": {"labels": selector}, "spec": pod},
    }
    if kind == "deployment":
        return [_workload("Deployment", name, spec)]
    spec = {"serviceName": name, "podManagementPolicy": "Parallel", **spec}
    return [service(name, selector, {}, headless=True), _workload("StatefulSet", name, spec)]


def _verified(request: RenderRequest) -> str:
    auth = request.config.auth
    if auth.tls_cert is None:
        return ""
    return f" --tls-ca {TLS_MOUNT}/{'ca.crt' if auth.tls_ca is not None else 'tls.crt'}"


def _workload(kind: str, name: str, spec: Document) -> Document:
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name}, "spec": spec}
