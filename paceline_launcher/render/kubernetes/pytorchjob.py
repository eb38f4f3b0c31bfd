"""PyTorchJob target: a job of Kubeflow's training operator whose every pod runs `paceline node`."""

from __future__ import annotations

import math
from typing import Any

from paceline_launcher.render.kubernetes.manifests import (
    NETWORK_COMMENT,
    STORAGE_COMMENT,
    config_map,
    disruption_budget,
    kustomization,
    namespace,
    network_policy,
    runs_storage,
    service,
)
from paceline_launcher.render.kubernetes.pods import (
    PART_OF,
    RUN_FILE,
    PodProcess,
    holds_run,
    labels,
    pod_spec,
    rest_probes,
    tls_settings,
)
from paceline_launcher.render.request import Document, RenderRequest
from paceline_launcher.render.run_file import run_file
from paceline_launcher.render.yaml_text import yaml_text

USES = frozenset(
    {
        *("image", "gpus_per_node", "nodes", "namespace", "secret", "run_dir", "volumes"),
        *("storage_class", "storage_gib", "environment", "rdma", "host_network", "gpu_resource"),
        *("cpus", "memory_gib", "shm_gib", "scheduler"),
    }
)
CONTAINER = "pytorch"
"""The operator sets the job's environment in the container of this name."""
MASTER_PORT = 23456
"""First port of node 0: the operator reads it from the container's port of this name."""
MASTER_PORT_NAME = "pytorchjob-port"
SPARE_S = 30
"""After the time in which a run that is stopped writes its checkpoint."""


def render(request: RenderRequest) -> dict[str, str]:
    """Files by name. Raises BadInput."""
    files = {
        # The operator adds a container of its own, which the profile "restricted" would refuse.
        "namespace.yaml": yaml_text(
            [namespace(request, "baseline")],
            "The training operator adds a container to workers that the profile restricted would refuse.",
        ),
        "config.yaml": yaml_text(
            [config_map(request, _run_file(request))],
            "The run's configuration. Every node reads the same file; it contains no secret.",
        ),
    }
    if not holds_run(request):
        files["storage.yaml"] = yaml_text([runs_storage(request)], STORAGE_COMMENT)
    if not request.options.host_network:
        # It does not apply to pods that have their nodes' addresses.
        files["network.yaml"] = yaml_text([network_policy(request)], NETWORK_COMMENT)
    files["job.yaml"] = yaml_text(
        [_job(request)],
        "Every pod runs the same command: node 0 (Master) runs Redis, the controllers and its share of the workers,\n"
        "the others their share. A pod that is killed is made again and joins again. The job ends with the run.",
    )
    if request.rest_port is not None:
        files["rest.yaml"] = yaml_text(
            [_rest(request, request.rest_port)], "The REST interface and the dashboard, on node 0."
        )
    files["disruption.yaml"] = yaml_text(
        [disruption_budget(request.name, {PART_OF: request.name})],
        "A node that is emptied takes one pod at a time.",
    )
    files["kustomization.yaml"] = kustomization(request, list(files), request.controller_secrets())
    return files


def _run_file(request: RenderRequest) -> str:
    changes: dict[str, dict[str, Any]] = {
        "fleet": {"provider": "local"},
        "auth": tls_settings(request),
    }
    if request.rest_port is not None:
        changes["rest"] = {"host": "0.0.0.0", "port": request.rest_port}
    if request.config.redis.url is not None:
        changes["redis"] = {"appendfsync": "everysec", "maxmemory_mb": None}
    return run_file(request.config, changes)


def _job(request: RenderRequest) -> Document:
    nodes = request.nodes
    replicas: Document = {"Master": _replicas(request, "master", 1)}
    if nodes > 1:
        replicas["Worker"] = _replicas(request, "worker", nodes - 1)
    policy = {
        "cleanPodPolicy": "Running",
        "backoffLimit": request.config.fleet.max_restarts,
    }
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": request.name},
        "spec": {"runPolicy": policy, "pytorchReplicaSpecs": replicas},
    }


def _replicas(request: RenderRequest, component: str, count: int) -> Document:
    first = component == "master"
    ports = {MASTER_PORT_NAME: MASTER_PORT}
    probes: dict[str, Document] = {}
    if first and request.rest_port is not None:
        ports["rest"] = request.rest_port
        # Node 0 restarts controllers itself: no probe ends the pod.
        probes = {"readinessProbe": rest_probes(request)["readinessProbe"]}
    process = PodProcess(
        name=CONTAINER,
        **_command(request),
        cpus=request.node_cpus(),
        memory_gib=request.node_memory_gib(),
        gpus=request.options.gpus_per_node or 0,
        secrets=request.controller_secrets(),
        tensors=True,
        ports=ports,
        probes=probes,
    )
    grace_s = math.ceil(request.config.fleet.stop_s) + SPARE_S
    return {
        "replicas": count,
        # An exit status of the run is final. A pod that was killed (128 and more) is made again.
        "restartPolicy": "ExitCode",
        "template": {
            "metadata": {
                "labels": labels(request, component),
                # A sidecar would stand between the nodes, and would not end with the run.
                "annotations": {"sidecar.istio.io/inject": "false"},
            },
            "spec": {"terminationGracePeriodSeconds": grace_s, **pod_spec(request, process)},
        },
    }


def _command(request: RenderRequest) -> dict[str, Any]:
    if request.config.redis.url is None:
        command, path = ["tini", "--", "paceline"], RUN_FILE
        return {"command": command, "args": ["node", path, f"--run-dir={request.run_dir}"]}
    # The address goes into a private file: every user of the node can read command lines.
    script = f"""\
set -eu
umask 077
{{ cat {RUN_FILE}; printf '\\n[redis]\\nurl = "%s"\\n' "$REDIS_URL"; }} > /tmp/run.toml
exec paceline node /tmp/run.toml --run-dir={request.run_dir}
"""
    return {"command": ["tini", "--", "sh", "-c"], "args": [script]}


def _rest(request: RenderRequest, port: int) -> Document:
    selector = labels(request, "master")
    return service(f"{request.name}-rest", selector, {"rest": port}, headless=False)
