"""Ray target: a job for `ray job submit` whose entrypoint has Redis and the controllers, and whose
workers Ray places.

submit.sh ──job──► head: start.sh = paceline node ──Ray──► an actor for each worker, on any machine
of the cluster
"""

from __future__ import annotations

import shlex
from typing import Any

from paceline.worker_pools import POLICY, ROLLOUT, SCORER
from paceline_launcher.render.request import RenderRequest
from paceline_launcher.render.shell import run_file_text, secrets_text
from paceline_launcher.render.yaml_text import yaml_text

USES = frozenset({"gpus_per_node", "run_dir", "environment"})
START, SUBMIT, RUNTIME_ENV = "start.sh", "submit.sh", "runtime-env.yaml"
LOOK_S = 5
WAIT_LOOKS = 120
"""Ten minutes for a head that is started again."""


def render(request: RenderRequest) -> dict[str, str]:
    """Files by name. Raises BadInput."""
    request.check_workers_fit_nodes()
    return {
        START: _start(request),
        RUNTIME_ENV: _runtime_env(request),
        SUBMIT: _submit(request),
    }


def _changes(request: RenderRequest) -> dict[str, dict[str, Any]]:
    gpus = {POLICY: 0, ROLLOUT: 0, SCORER: 0}
    for pool in request.pools:
        gpus[pool.role] = max(gpus[pool.role], pool.gpus)
    return {
        "fleet": {"provider": "ray"},
        "ray": {"address": "auto", **{f"{role}_gpus": count for role, count in gpus.items()}},
        "rest": {"port": request.rest_port or 0},
    }


def _start(request: RenderRequest) -> str:
    run_dir = shlex.quote(request.run_dir)
    # Workers are on other machines: what they need is in the environment there, and the token in
    # the run directory.
    elsewhere = request.worker_secrets()
    secrets = {n: s for n, s in request.controller_secrets().items() if n not in elsewhere}
    return f"""\
#!/bin/sh
# Entrypoint of the job, on the head of the cluster: Redis and the controllers of the run {request.name}. Ray starts the workers.
set -eu
umask 077
run_dir={run_dir}
mkdir -p "$run_dir/nodes"
{secrets_text(secrets, exported="")}config=$run_dir/ray.toml
{run_file_text(request.config, _changes(request))}master=$(python -c 'import ray; print(ray.util.get_node_ip_address())'):{request.grpc_port}
exec paceline node "$config" --run-dir "$run_dir" --node-rank 0 --nodes 1 --master "$master"
"""


def _runtime_env(request: RenderRequest) -> str:
    found = {"working_dir": ".", "env_vars": dict(request.options.environment)}
    return yaml_text(
        [found],
        "The job's runtime environment: its files, and variables of all workers. No secrets.",
    )


def _submit(request: RenderRequest) -> str:
    restarts = request.config.fleet.max_restarts
    return f"""\
#!/bin/bash
# Submit the run {request.name} and wait for its end:   RAY_API_SERVER_ADDRESS=http://HEAD:8265 ./{SUBMIT}
#
# The exit status is the run's. If the head is lost, the job is submitted again to the head that is started in its
# place, and continues the run.
set -euo pipefail
cd "$(dirname "${{BASH_SOURCE[0]}}")"
command -v ray > /dev/null || {{
  echo "error: there is no command ray: pip install 'paceline[ray]'" >&2
  exit 2
}}
name=${{1:-{request.name}}}
for ((start = 0; start <= {restarts}; start++)); do
  id=$name-$(date +%Y%m%d-%H%M%S)-$start
  status=0
  ray job submit --runtime-env {RUNTIME_ENV} --submission-id "$id" -- sh {START} || status=$?
  if [ "$status" -eq 0 ]; then exit 0; fi
  # The head says how the job ended, if it is there and knows the job.
  said=$(ray job status "$id" 2>&1 || true)
  if [[ $said =~ failed\\ with\\ exit\\ code\\ ([0-9]+) ]] && [ "${{BASH_REMATCH[1]}}" -lt 128 ]; then
    exit "${{BASH_REMATCH[1]}}"
  fi
  if [[ $said == *STOPPED* ]]; then exit 130; fi
  if [[ $said == *runtime_env* || $said == *"runtime environment"* ]]; then
    # Its environment could not be made: the next job would fail as this one did.
    echo "$said" >&2
    exit 1
  fi
  echo "the job $id was lost: it is submitted again once a head answers" >&2
  looks=0
  sleep {LOOK_S}
  until answer=$(ray job list 2>&1); do
    looks=$((looks + 1))
    if [ "$looks" -gt {WAIT_LOOKS} ]; then
      echo "$answer" >&2
      echo "error: no head of a Ray cluster answers at ${{RAY_API_SERVER_ADDRESS:-${{RAY_ADDRESS:-http://127.0.0.1:8265}}}}" >&2
      exit 3
    fi
    sleep {LOOK_S}
  done
done
echo "error: the job was lost {restarts + 1} times" >&2
exit 1
"""
