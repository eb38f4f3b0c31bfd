# shellcheck shell=sh
# The pod of the controllers writes its address to the run directory. Made again it has another one:
# the worker follows. A shared file system announces no change.
addresses() {
  if [ -e "${run_dir:?}/nodes/job.json" ]; then
    tr -d ' \n"' < "$run_dir/nodes/job.json" | sed -n 's/.*addresses:\[\([^]]*\)\].*/\1/p'
  fi
}
pause() {
  sleep 5 &
  wait $! || true
}
worker=
leave() {
  if [ -z "${PACELINE_TOKEN:-}" ] && [ -e "$run_dir/token" ]; then
    PACELINE_TOKEN=$(cat "$run_dir/token")
    export PACELINE_TOKEN
  fi
  paceline drain "${name:?}" --replace --wait "${leave_s:?}" --controllers "$known" || kill "$worker"
}
known=$(addresses)
while [ -z "$known" ]; do
  pause
  known=$(addresses)
done
while :; do
  paceline "$@" --controllers "$known" &
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
