# shellcheck shell=bash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
command -v ray > /dev/null || {
  echo "error: there is no command ray: pip install 'paceline[ray]'" >&2
  exit 2
}
for ((start = 0; start <= ${max_restarts:?}; start++)); do
  id=${name:?}-$(date +%Y%m%d-%H%M%S)-$start
  status=0
  ray job submit --runtime-env runtime-env.yaml --submission-id "$id" -- sh start.sh || status=$?
  if [ "$status" -eq 0 ]; then exit 0; fi
  # The head says how the job ended, if it is there and knows the job.
  said=$(ray job status "$id" 2>&1 || true)
  if [[ $said =~ failed\ with\ exit\ code\ ([0-9]+) ]] && [ "${BASH_REMATCH[1]}" -lt 128 ]; then
    exit "${BASH_REMATCH[1]}"
  fi
  if [[ $said == *STOPPED* ]]; then exit 130; fi
  if [[ $said == *runtime_env* || $said == *"runtime environment"* ]]; then
    # Its environment could not be made: the next job would fail as this one did.
    echo "$said" >&2
    exit 1
  fi
  echo "the job $id was lost: it is submitted again once a head answers" >&2
  looks=0
  sleep 5
  until answer=$(ray job list 2>&1); do
    looks=$((looks + 1))
    # Ten minutes for a head that is started again.
    if [ "$looks" -gt 120 ]; then
      echo "$answer" >&2
      echo "error: no head of a Ray cluster answers at ${RAY_API_SERVER_ADDRESS:-${RAY_ADDRESS:-http://127.0.0.1:8265}}" >&2
      exit 3
    fi
    sleep 5
  done
done
echo "error: the job was lost $start times" >&2
exit 1
