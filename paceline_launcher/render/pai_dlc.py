"""PAI-DLC target: the request of CreateJob, with one kind of pod for each role or with a PyTorch
job's nodes.

    custom    Controller (Redis, controllers; the job's outcome) ◄── Policy, Rollout, Scorer-NAME: a worker in each pod
    pytorch   Master, Worker: `paceline node` in each pod, which starts its share of all processes

Field names: API version 2020-12-03 of pai-dlc.
"""

from __future__ import annotations

import json
import math
import shlex
from typing import Any

from paceline.errors import BadInput
from paceline_launcher.render.kubernetes.pods import holds_run
from paceline_launcher.render.request import Document, Pool, RenderRequest
from paceline_launcher.render.shell import run_file_text, secrets_text
from paceline_launcher.render.time_limit import minutes

USES = frozenset(
    {
        *("image", "gpus_per_node", "nodes", "run_dir", "volumes", "environment", "rdma"),
        *("cpus", "memory_gib", "shm_gib", "workspace", "quota", "job_type", "gpu_type"),
        "time_limit",
    }
)
FILE = "job.json"
LONGEST_REQUEST = 65_536
"""Bytes of all parameters of CreateJob. The service adds some of its own."""
RESERVED = 4_096
CONTROLLERS_MEMORY_GIB = 16
"""Controllers, Redis, and the export of the model on a CPU."""
SPARE_S = 30
LOOK_S = 5
"""Between two looks at a file of the run directory: a shared file system announces no change."""


def render(request: RenderRequest) -> dict[str, str]:
    """Files by name. Raises BadInput."""
    _check(request)
    document = _pytorch(request) if request.options.job_type == "pytorch" else _custom(request)
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    if len(text.encode()) > LONGEST_REQUEST - RESERVED:
        raise BadInput(
            f"the job has {len(text.encode())} bytes, and PAI-DLC takes {LONGEST_REQUEST} with its own: shorten the settings, "
            "such as long texts of [rollout] or [objective]"
        )
    return {FILE: text}


def _check(request: RenderRequest) -> None:
    options = request.options
    if options.job_type not in ("custom", "pytorch"):
        raise BadInput(f"--job-type {options.job_type}: choose custom or pytorch")
    for name, value in (("--workspace", options.workspace), ("--resource-quota", options.quota)):
        if value is None:
            raise BadInput(f"{name} is missing: the console of PAI shows its ID")
    if options.job_type == "custom":
        if options.nodes is not None:
            raise BadInput(
                "--nodes: a custom job has one pod for each worker. Use --job-type pytorch"
            )
        request.check_workers_fit_nodes()
    if not holds_run(request):
        raise BadInput(
            f"--volume: no data set holds the run directory {request.run_dir}, which all pods share. Mount one with "
            "--volume ID:/PATH, and give --run-dir a path in it"
        )


def _job(request: RenderRequest, kind: str, specs: list[Document], command: str) -> Document:
    options = request.options
    fleet = request.config.fleet
    # A worker's pod waits for its drain, that of the controllers for a checkpoint.
    longest_s = max(fleet.stop_s, fleet.drain_s + SPARE_S)
    settings: Document = {"TerminationGracePeriodSeconds": math.ceil(longest_s) + SPARE_S}
    if options.rdma is not None:
        settings["EnableRDMA"] = True
    longest = minutes(options.time_limit)
    return {
        "DisplayName": request.name,
        "WorkspaceId": options.workspace,
        "ResourceId": options.quota,
        "JobType": kind,
        **({} if longest is None else {"JobMaxRunningTimeMinutes": longest}),
        "Settings": settings,
        "Envs": dict(options.environment),
        "DataSources": [{"DataSourceId": one.name, "MountPath": one.path} for one in options.volumes],
        "JobSpecs": specs,
        "UserCommand": command,
    }  # fmt: skip


def _spec(
    request: RenderRequest, kind: str, count: int, *, cpus: int, memory_gib: int, gpus: int
) -> Document:
    resources = {"CPU": str(cpus), "Memory": f"{memory_gib}Gi"}
    if gpus:
        resources["GPU"] = str(gpus)
        if request.options.gpu_type is not None:
            resources["GPUType"] = request.options.gpu_type
    resources["SharedMemory"] = f"{request.options.shm_gib}Gi"
    return {
        "Type": kind,
        "Image": request.options.image,
        "PodCount": count,
        "ResourceConfig": resources,
    }


def _pytorch(request: RenderRequest) -> Document:
    def spec(kind: str, count: int) -> Document:
        cpus, memory_gib = request.node_cpus(), request.node_memory_gib()
        gpus = request.options.gpus_per_node or 0
        found = _spec(request, kind, count, cpus=cpus, memory_gib=memory_gib, gpus=gpus)
        # An exit status of the run is final. A pod that was killed (128 and more) is made again.
        return {**found, "RestartPolicy": "ExitCode"}

    nodes = request.nodes
    specs = [spec("Master", 1), *([spec("Worker", nodes - 1)] if nodes > 1 else [])]
    command = _begin(request, "local") + 'exec paceline node "$config" --run-dir "$run_dir"\n'
    return _job(request, "PyTorchJob", specs, command)


def _custom(request: RenderRequest) -> Document:
    count = request.config.fleet.controllers
    controller = {
        **_spec(request, "Controller", 1, cpus=count + 2, memory_gib=CONTROLLERS_MEMORY_GIB, gpus=0),
        "IsChief": True,
        "RestartPolicy": "ExitCode",
        "UserCommand": _begin(request, "none") + _controller(request),
    }  # fmt: skip
    found = [controller]
    for pool in request.pools:
        kind = pool.role.capitalize() + (f"-{pool.scorer}" if pool.scorer else "")
        size = {"cpus": pool.cpus, "memory_gib": pool.memory_gib, "gpus": pool.gpus}
        worker = {
            # A worker that ends before the run, for whatever reason, is started again.
            "RestartPolicy": "OnFailure",
            "UserCommand": _begin(request, "none") + _worker(request, pool),
        }
        found.append({**_spec(request, kind, pool.count, **size), **worker})
    # The API wants a command of the job; each role has its own.
    unused = "echo 'error: the roles of this job have commands of their own' >&2; exit 2"
    job = _job(request, "Custom", found, unused)
    return {**job, "SuccessPolicy": "ChiefWorker"}


def _begin(request: RenderRequest, provider: str) -> str:
    """What every pod does first."""
    changes: dict[str, dict[str, Any]] = {
        "fleet": {"provider": provider},
        "rest": {"port": request.rest_port or 0},
    }
    return f"""\
set -eu
umask 077
run_dir={shlex.quote(request.run_dir)}
{secrets_text(request.controller_secrets(), exported="")}config=/tmp/run.toml
{run_file_text(request.config, changes)}"""


def _controller(request: RenderRequest) -> str:
    return f"""\
master=$(hostname -i | cut -d ' ' -f 1):{request.grpc_port}
exec paceline node "$config" --run-dir "$run_dir" --node-rank 0 --nodes 1 --master "$master"
"""


def _worker(request: RenderRequest, pool: Pool) -> str:
    scorer = f" --scorer {shlex.quote(pool.scorer)}" if pool.scorer else ""
    leave_s = math.ceil(request.config.fleet.drain_s) + SPARE_S
    return f"""\
# The pod of the controllers writes its address to the run directory. Made again it has another one: the worker follows.
addresses() {{
  if [ -e "$run_dir/nodes/job.json" ]; then
    tr -d ' \\n"' < "$run_dir/nodes/job.json" | sed -n 's/.*addresses:\\[\\([^]]*\\)\\].*/\\1/p'
  fi
}}
pause() {{
  sleep {LOOK_S} &
  wait $! || true
}}
name={pool.label}-$(hostname | cut -c -40)
worker=
leave() {{
  if [ -z "${{PACELINE_TOKEN:-}}" ] && [ -e "$run_dir/token" ]; then
    PACELINE_TOKEN=$(cat "$run_dir/token")
    export PACELINE_TOKEN
  fi
  paceline drain "$name" --replace --wait {leave_s} --controllers "$known" || kill "$worker"
}}
known=$(addresses)
while [ -z "$known" ]; do
  pause
  known=$(addresses)
done
while :; do
  paceline {pool.role} "$config"{scorer} --controllers "$known" --id "$name" --run-dir "$run_dir" &
  worker=$!
  trap leave TERM
  while kill -0 "$worker" 2> /dev/null && [ "$(addresses)" = "$known" ]; do pause; done
  trap - TERM
  now=$(addresses)
  if [ "$now" = "$known" ]; then break; fi
  kill "$worker" 2> /dev/null || true
  wait "$worker" || true
  known=$now
done
wait "$worker"
"""
