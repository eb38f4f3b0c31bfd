# shellcheck shell=sh
secrets=${PACELINE_SECRETS:-${run_dir:?}/secrets.env}
if [ -e "$secrets" ]; then
  case $(stat -L -c %a "$secrets") in
    600 | 400) ;;
    *)
      echo "error: others may read $secrets: chmod 600 $secrets" >&2
      exit 2
      ;;
  esac
  set -a
  # shellcheck source=/dev/null
  . "$secrets"
  set +a
fi
