# shellcheck shell=bash
# Jobs that share a node have ports of their own: the job id chooses 16 of them, and the next 16
# follow if one of those is taken. All lie below the ephemeral ports of Linux, from 32768 on. The
# script runs on node 0.
free() {
  local port
  for ((port = $1; port < $1 + 16; port++)); do
    if (: < "/dev/tcp/127.0.0.1/$port") 2> /dev/null; then return 1; fi
  done
}
slot=$((SLURM_JOB_ID % 1408))
until free $((10240 + slot * 16)); do slot=$(((slot + 1) % 1408)); done
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts[0]} MASTER_PORT=$((10240 + slot * 16)) max_restarts

set -- "${config:?}" --run-dir "${run_dir:?}"
if [ -n "${rest_after?}" ]; then set -- "$@" --set "rest.port=$((MASTER_PORT + rest_after))"; fi

# scancel and preemption signal the script too, and then Slurm decides whether the job is queued again.
told=
trap 'told=1' TERM
rm -f "$run_dir/nodes/outcome.json"
# A node whose command was killed joins again, node 0 included. Slurm signals all of a node's
# processes: the shell waits.
# shellcheck disable=SC2016 # every node expands its own
node='
  trap : TERM
  export RANK=$SLURM_NODEID WORLD_SIZE=$SLURM_NNODES
  for ((start = 0; start <= max_restarts; start++)); do
    status=0
    paceline node "$@" || status=$?
    if [ "$status" -lt 128 ] || [ "$status" -eq 130 ] || [ "$status" -eq 143 ]; then break; fi
  done
  exit "$status"'
status=0
srun --nodes="$SLURM_NNODES" --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
  --kill-on-bad-exit=0 --wait=0 bash -c "$node" node "$@" || status=$?

# The run's own exit status, which node 0 wrote: another node that failed on the way does not fail the job.
outcome=$(sed -n 's/^ *"exit_code": *\([0-9]*\).*/\1/p' "$run_dir/nodes/outcome.json" 2> /dev/null || true)
status=${outcome:-$status}
# 128 and more: the run was stopped before the time limit, or killed. The next start continues it.
if [ "$status" -ge 128 ] && [ -z "$told" ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "$max_restarts" ]; then
  scontrol requeue "$SLURM_JOB_ID" || true
fi
exit "$status"
