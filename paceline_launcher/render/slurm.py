"""Slurm target: one batch script that starts `paceline node` on every node of its allocation."""

from __future__ import annotations

import math
import shlex

from paceline.errors import BadInput
from paceline_launcher.render.request import RenderRequest
from paceline_launcher.render.shell import environment_text, run_file_text, secrets_text
from paceline_launcher.render.time_limit import minutes

USES = frozenset(
    {
        *("gpus_per_node", "nodes", "run_dir", "environment", "cpus", "memory_gib"),
        *("partition", "account", "time_limit"),
    }
)
SCRIPT = "job.sbatch"
SPARE_S = 60
"""Slurm may signal a job a minute early or late, and a stopped run must have ended before its time
limit."""
FIRST_PORT = 10240
SLOTS = 1408
PORTS = 16
"""Of one job. All slots lie below the ephemeral ports of Linux, from 32768 on."""


def render(request: RenderRequest) -> dict[str, str]:
    """Files by name. Raises BadInput."""
    return {SCRIPT: _directives(request) + _body(request)}


def _directives(request: RenderRequest) -> str:
    options, nodes = request.options, request.nodes
    stop_s = math.ceil(request.config.fleet.stop_s) + SPARE_S
    _check_time(options.time_limit, stop_s)
    found = {
        "job-name": request.name,
        "partition": options.partition,
        "account": options.account,
        "nodes": nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": request.node_cpus(),
        "mem": f"{request.node_memory_gib()}G",
        "gpus-per-node": options.gpus_per_node,
        "time": options.time_limit,
        # To the nodes' processes, not to this script: the run stops with a checkpoint.
        "signal": f"TERM@{stop_s}",
        "output": "%x-%j.log",
        "open-mode": "append",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in found.items() if value is not None]
    lines.append("#SBATCH --requeue")
    for line in lines:
        if len(line.split()) != 2:
            raise BadInput(f"{line}: a value of a Slurm option has no space")
    return f"{_head(request)}{chr(10).join(lines)}\n"


def _check_time(limit: str, stop_s: int) -> None:
    """Raises BadInput for what sbatch does not take, or what leaves no time to train."""
    found = minutes(limit)
    if found is not None and found * 60 <= stop_s:
        raise BadInput(
            f"--time-limit {limit}: the run is asked to stop {stop_s} s before its end (fleet.stop_s), so nothing would be "
            "trained. Give more"
        )


def _head(request: RenderRequest) -> str:
    nodes = "1 node" if request.nodes == 1 else f"{request.nodes} nodes"
    return f"""\
#!/bin/bash
# Run {request.name} on {nodes}:   sbatch {SCRIPT}
#
# Submit it in the directory to which relative paths in the settings refer, with `paceline` on PATH. That directory and
# the run directory are on a file system that all nodes share. Node 0 runs Redis, the controllers and its share of the
# workers, the others their share. The job ends with the run and has its exit status. A job that is queued again
# (a lost node, preemption, the time limit) continues the run.
"""


def _body(request: RenderRequest) -> str:
    run_dir = shlex.quote(request.options.run_dir or f"runs/{request.name}")
    parts = [
        f"""\
set -euo pipefail
umask 077
command -v paceline > /dev/null || {{
  echo "error: there is no command paceline: activate its environment before sbatch" >&2
  exit 2
}}
run_dir=$(realpath -m {run_dir})
mkdir -p "$run_dir/nodes"
""",
        secrets_text(request.controller_secrets()),
        environment_text(request),
        _run_file(request),
        _ports(request),
        _start(request),
        _end(request),
    ]
    return "\n".join(part for part in parts if part)


def _run_file(request: RenderRequest) -> str:
    local = {"fleet": {"provider": "local"}}
    return f"""\
# Slurm keeps the script as it was submitted: a job that is queued again reads the same settings.
config=$run_dir/slurm.toml
{run_file_text(request.config, local, with_token_file=True)}"""


def _ports(request: RenderRequest) -> str:
    rest = ""
    if request.config.rest.enabled and not request.config.rest.port:
        controllers = request.config.fleet.controllers
        rest = f'set -- "$@" --set "rest.port=$((MASTER_PORT + {controllers + 1}))"\n'
    return f"""\
# Jobs that share a node have ports of their own: the job id chooses {PORTS} of them, and the next {PORTS} follow if one
# of those is taken. The script runs on node 0.
free() {{
  local port
  for ((port = $1; port < $1 + {PORTS}; port++)); do
    if (: < "/dev/tcp/127.0.0.1/$port") 2> /dev/null; then return 1; fi
  done
}}
slot=$((SLURM_JOB_ID % {SLOTS}))
until free $(({FIRST_PORT} + slot * {PORTS})); do slot=$(((slot + 1) % {SLOTS})); done
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${{hosts[0]}} MASTER_PORT=$(({FIRST_PORT} + slot * {PORTS}))

set -- "$config" --run-dir "$run_dir"
{rest}"""


def _start(request: RenderRequest) -> str:
    return f"""\
# scancel and preemption signal the script too, and then Slurm decides whether the job is queued again.
told=
trap 'told=1' TERM
rm -f "$run_dir/nodes/outcome.json"
# A node whose command was killed joins again, node 0 included. Slurm signals all of a node's processes: the shell waits.
# shellcheck disable=SC2016 # every node expands its own
node='
  trap : TERM
  export RANK=$SLURM_NODEID WORLD_SIZE=$SLURM_NNODES
  for ((start = 0; start <= {request.config.fleet.max_restarts}; start++)); do
    status=0
    paceline node "$@" || status=$?
    if [ "$status" -lt 128 ] || [ "$status" -eq 130 ] || [ "$status" -eq 143 ]; then break; fi
  done
  exit "$status"'
status=0
srun --nodes="$SLURM_NNODES" --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \\
  --kill-on-bad-exit=0 --wait=0 bash -c "$node" node "$@" || status=$?
"""


def _end(request: RenderRequest) -> str:
    return f"""\
# The run's own exit status, which node 0 wrote: another node that failed on the way does not fail the job.
outcome=$(sed -n 's/^ *"exit_code": *\\([0-9]*\\).*/\\1/p' "$run_dir/nodes/outcome.json" 2> /dev/null || true)
status=${{outcome:-$status}}
# 128 and more: the run was stopped before the time limit, or killed. The next start continues it.
if [ "$status" -ge 128 ] && [ -z "$told" ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {request.config.fleet.max_restarts} ]; then
  scontrol requeue "$SLURM_JOB_ID" || true
fi
exit "$status"
"""
