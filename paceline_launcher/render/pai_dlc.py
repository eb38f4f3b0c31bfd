"""PAI-DLC target: the request of CreateJob, API version 2020-12-03.

custom    Controller (Redis, controllers; the job's outcome) ◄── Policy, Rollout, Scorer-NAME:
          a worker in each pod
pytorch   Master, Worker: `paceline node` in each pod, which starts its part of all processes
"""

import json
import math
from typing import Any

from paceline.errors import BadInput
from paceline_launcher.render.options import limit_minutes
from paceline_launcher.render.request import RenderRequest
from paceline_launcher.render.templates import Templates, script_run_file

Document = dict[str, Any]

LONGEST_REQUEST = 65_536
"""Bytes of CreateJob's parameters, with the service's own."""
RESERVED = 4_096
CONTROLLERS_MEMORY_GIB = 16
"""Memory for controllers, Redis, and the export of the model on a CPU."""
SPARE_S = 30


def pai_dlc(request: RenderRequest) -> dict[str, str]:
    """The job as JSON. Raises BadInput."""
    _check(request)
    pytorch = request.options.job_type == "pytorch"
    changes: dict[str, dict[str, Any]] = {
        "fleet": {"provider": "local" if pytorch else "none"},
        "rest": {"port": request.rest_port or 0},
    }
    run_toml = script_run_file(request.config, changes)
    secrets = request.controller_secrets()
    templates = Templates(request, target="pai-dlc", run_toml=run_toml, secrets=secrets)
    document = _pytorch(request, templates) if pytorch else _custom(request, templates)
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    if len(text.encode()) > LONGEST_REQUEST - RESERVED:
        raise BadInput(
            f"the job has {len(text.encode())} bytes, and PAI-DLC takes {LONGEST_REQUEST} with its "
            "own: shorten the settings, such as long texts of [rollout] or [objective]"
        )
    return {"job.json": text}


def _check(request: RenderRequest) -> None:
    options = request.options
    if options.job_type not in ("custom", "pytorch"):
        raise BadInput(f"--job-type {options.job_type}: choose custom or pytorch")
    needed = {"--workspace": options.workspace, "--resource-quota": options.resource_quota}
    for name, value in needed.items():
        if value is None:
            raise BadInput(f"{name} is missing: the console of PAI shows its ID")
    if options.job_type == "custom":
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


def _job(request: RenderRequest, kind: str, specs: list[Document], command: str) -> Document:
    options, fleet = request.options, request.config.fleet
    # A worker's pod waits for its drain, that of the controllers for a checkpoint.
    longest_s = max(fleet.stop_s, fleet.drain_s + SPARE_S)
    settings: Document = {"TerminationGracePeriodSeconds": math.ceil(longest_s) + SPARE_S}
    if options.rdma is not None:
        settings["EnableRDMA"] = True
    longest = limit_minutes(options.time_limit)
    return {
        "DisplayName": request.name,
        "WorkspaceId": options.workspace,
        "ResourceId": options.resource_quota,
        "JobType": kind,
        **({} if longest is None else {"JobMaxRunningTimeMinutes": longest}),
        "Settings": settings,
        "Envs": request.environment,
        "DataSources": [
            {"DataSourceId": volume.name, "MountPath": volume.path} for volume in request.volumes
        ],
        "JobSpecs": specs,
        "UserCommand": command,
    }


def _spec(
    request: RenderRequest, kind: str, count: int, cpus: int, memory_gib: int, gpus: int
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


def _pytorch(request: RenderRequest, templates: Templates) -> Document:
    size = (request.node_cpus(), request.node_memory_gib(), request.options.gpus_per_node or 0)
    counts = {"Master": 1, "Worker": request.nodes - 1}
    # An exit status of the run is final. A pod that was killed (128 and more) is made again.
    specs = [
        {**_spec(request, kind, count, *size), "RestartPolicy": "ExitCode"}
        for kind, count in counts.items()
        if count
    ]
    return _job(request, "PyTorchJob", specs, templates.text("pai-dlc/pod.sh", pool=None))


def _custom(request: RenderRequest, templates: Templates) -> Document:
    cpus = request.config.fleet.controllers + 2
    specs = [
        {
            **_spec(request, "Controller", 1, cpus, CONTROLLERS_MEMORY_GIB, 0),
            "IsChief": True,
            "RestartPolicy": "ExitCode",
            "UserCommand": templates.text("pai-dlc/pod.sh", pool=None),
        }
    ]
    for pool in request.pools:
        kind = pool.role.capitalize() + (f"-{pool.scorer}" if pool.scorer else "")
        specs.append(
            {
                **_spec(request, kind, pool.count, pool.cpus, pool.memory_gib, pool.gpus),
                # A worker that ends before the run, for whatever reason, is started again.
                "RestartPolicy": "OnFailure",
                "UserCommand": templates.text("pai-dlc/pod.sh", pool=pool),
            }
        )
    # The API wants a command of the job; each role has its own.
    unused = "echo 'error: the roles of this job have commands of their own' >&2; exit 2"
    return {**_job(request, "Custom", specs, unused), "SuccessPolicy": "ChiefWorker"}
