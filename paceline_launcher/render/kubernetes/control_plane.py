"""Redis, the controllers, and the job that waits for the end of a run, on Kubernetes."""

from __future__ import annotations

import math

from paceline.redis.users import CONTROLLER, RULES
from paceline_launcher.render.kubernetes.manifests import service
from paceline_launcher.render.kubernetes.pods import (
    RUN_FILE,
    PodProcess,
    container_security,
    labels,
    pod_security,
    pod_spec,
    rest_probes,
)
from paceline_launcher.render.request import Document, RenderRequest, Secret, Secrets

REDIS_PORT = 6379
REDIS_MB = 3072
"""Of a run that does not limit it (redis.maxmemory_mb): a container must have a limit."""
HEADROOM = 4 / 3
"""Memory of Redis's container beside its data: buffers of clients, and the rewrite of its log."""
LOG_SIZES = 6
"""Volume of Redis's log in sizes of its data: the old and the new log during a rewrite, and growth
between two."""
SERVER = "$(python -c 'from paceline.redis.server import find_server; print(find_server())')"
"""The maintained server in the image."""


def controllers_service(request: RenderRequest) -> str:
    return f"{request.name}-controllers"


def addresses(request: RenderRequest) -> str:
    """The controllers' addresses, by the stable names of their pods."""
    count, host = request.config.fleet.controllers, controllers_service(request)
    return ",".join(
        f"{request.name}-controller-{index}.{host}:{request.grpc_port}" for index in range(count)
    )


def redis(request: RenderRequest) -> list[Document]:
    """One server with its log on a volume of its own: a restart loses nothing that was
    acknowledged."""
    name, config = f"{request.name}-redis", request.config.redis
    memory_mb = config.maxmemory_mb or REDIS_MB
    selector = labels(request, "redis")
    limit = f"{math.ceil(memory_mb * HEADROOM)}Mi"
    # The password goes into a private file: every user of the node can read command lines. Whoever
    # learns it can use the keys of runs, and cannot command the server.
    start = f"""\
set -eu
umask 077
printf 'user default on >%s resetchannels '"$RULES"'\\n' "$REDIS_PASSWORD" > /tmp/redis.conf
exec "{SERVER}" /tmp/redis.conf --port {REDIS_PORT} --appendonly yes --appendfsync {config.appendfsync} \
--dir /data --maxmemory {memory_mb}mb --maxmemory-policy noeviction
"""
    password = {"secretKeyRef": {"name": request.options.secret, "key": "redis-password"}}
    opened = {"tcpSocket": {"port": "redis"}}
    container: Document = {
        "name": "redis",
        "image": request.options.image,
        "securityContext": container_security(),
        "command": ["tini", "--", "sh", "-c"],
        "args": [start],
        "env": [
            {"name": "REDIS_PASSWORD", "valueFrom": password},
            {"name": "RULES", "value": RULES[CONTROLLER]},
        ],
        "ports": [{"name": "redis", "containerPort": REDIS_PORT}],
        "readinessProbe": opened,
        # A long log takes a while to load; only then the port answers.
        "livenessProbe": {**opened, "periodSeconds": 10, "failureThreshold": 30},
        "resources": {"requests": {"cpu": "1", "memory": limit}, "limits": {"memory": limit}},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    pod = {
        "automountServiceAccountToken": False,
        "securityContext": pod_security(request),
        "containers": [container],
    }
    storage = f"{math.ceil(memory_mb * LOG_SIZES / 1024)}Gi"
    claim: Document = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": storage}},
    }
    if request.options.storage_class is not None:
        claim["storageClassName"] = request.options.storage_class
    spec = {
        "serviceName": name,
        "replicas": 1,
        "selector": {"matchLabels": selector},
        "template": {"metadata": {"labels": selector}, "spec": pod},
        "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": claim}],
    }
    return [
        service(name, selector, {"redis": REDIS_PORT}, headless=True),
        {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": name}, "spec": spec},
    ]


def secrets(request: RenderRequest) -> Secrets:
    """Of the controllers, with the password of the server that is rendered."""
    found = request.controller_secrets()
    if request.config.redis.url is None:
        found["REDIS_PASSWORD"] = Secret("redis-password")
    return found


def with_redis(request: RenderRequest) -> str:
    """Shell text that makes /tmp/run.toml: the run's configuration with the address of Redis, which
    is a secret."""
    if request.config.redis.url is None:
        url, variable = f"redis://:%s@{request.name}-redis:{REDIS_PORT}/0", "REDIS_PASSWORD"
    else:
        url, variable = "%s", "REDIS_URL"
    line = f'printf \'\\n[redis]\\nurl = "{url}"\\n\' "${variable}"'
    return f"set -eu\numask 077\n{{ cat {RUN_FILE}; {line}; }} > /tmp/run.toml\n"


def controllers(request: RenderRequest) -> list[Document]:
    """A leader and hot standbys, and the service of their REST interface."""
    name, selector = f"{request.name}-controller", labels(request, "controller")
    ports = {"grpc": request.grpc_port}
    rest = ""
    if request.rest_port is not None:
        ports["rest"] = request.rest_port
        # Controllers of one host have consecutive ports. Each of these has a host of its own, and
        # the service expects the same port of all.
        rest = f' --set "rest.port=$(({request.rest_port} - index))"'
    process = PodProcess(
        name="controller",
        command=["tini", "--", "sh", "-c"],
        args=[
            with_redis(request)
            + 'index="${HOSTNAME##*-}"\n'
            + 'exec paceline controller /tmp/run.toml --controllers "$CONTROLLERS" --index "$index" '
            + f"--run-dir {request.run_dir}{rest}\n"
        ],
        cpus=1,
        memory_gib=2,
        secrets=secrets(request),
        environment={"CONTROLLERS": addresses(request)},
        ports=ports,
        probes=rest_probes(request),
    )
    apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": selector}}
    affinity = {"weight": 100, "podAffinityTerm": apart}
    pod = {
        **pod_spec(request, process),
        "serviceAccountName": name,
        "automountServiceAccountToken": True,
        "affinity": {
            "podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [affinity]}
        },
    }
    spec = {
        "serviceName": controllers_service(request),
        "replicas": request.config.fleet.controllers,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": selector},
        "template": {"metadata": {"labels": selector}, "spec": pod},
    }
    found = [service(controllers_service(request), selector, ports, headless=True)]
    if request.rest_port is not None:
        port = {"rest": request.rest_port}
        found.append(service(f"{request.name}-rest", selector, port, headless=False))
    found.append(
        {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": name}, "spec": spec}
    )
    return found


def end(request: RenderRequest) -> list[Document]:
    """Job that ends with the run: summary.json, the exported model, and the run's exit status."""
    (trainer, *_) = request.pools
    process = PodProcess(
        name="end",
        command=["tini", "--", "sh", "-c"],
        args=[
            with_redis(request)
            + 'exec paceline wait /tmp/run.toml --controllers "$CONTROLLERS" '
            + f"--run-dir {request.run_dir}\n"
        ],
        cpus=1,
        # The export reads the model on a CPU.
        memory_gib=trainer.memory_gib,
        secrets=secrets(request),
        environment={"CONTROLLERS": addresses(request)},
    )
    selector = labels(request, "end")
    pod = {"restartPolicy": "OnFailure", **pod_spec(request, process)}
    return [
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": f"{request.name}-end"},
            "spec": {
                "backoffLimit": 6,
                "template": {"metadata": {"labels": selector}, "spec": pod},
            },
        }
    ]
