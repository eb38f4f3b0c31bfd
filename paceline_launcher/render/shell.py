"""Shell text of rendered commands: secrets by reference, environment, and the run file. For POSIX
shells."""

from __future__ import annotations

import shlex
from typing import Any

from paceline.config.schema import Config
from paceline.errors import BadInput
from paceline_launcher.render.request import RenderRequest, Secrets
from paceline_launcher.render.run_file import run_file

END_OF_FILE = "END_OF_RUN_TOML"


TOKEN = "PACELINE_TOKEN"


def secrets_text(secrets: Secrets, *, exported: str = "exported before sbatch, or ") -> str:
    """Reads the private file of ``secrets``, below $run_dir. ``exported``: how else they may be
    set, for a comment."""
    if not secrets:
        return ""
    needed = [n for n, s in secrets.items() if not s.optional and n != TOKEN]
    checks = "".join(f': "${{{name}:?is not set: write it to $secrets}}"\n' for name in needed)
    own = f"# Without {TOKEN} all processes share a token of their own, in the run directory.\n"
    return f"""\
# Secrets are {exported}lines NAME=VALUE of a private file: {", ".join(secrets)}.
{own if TOKEN in secrets else ""}secrets=${{PACELINE_SECRETS:-$run_dir/secrets.env}}
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
{checks}"""


def environment_text(request: RenderRequest) -> str:
    return "".join(
        f"export {name}={shlex.quote(value)}\n"
        for name, value in request.options.environment.items()
    )


def run_file_text(
    config: Config, changes: dict[str, dict[str, Any]], *, with_token_file: bool = False
) -> str:
    """Writes the run's configuration with ``changes`` to $config. Raises BadInput if it has the
    line that ends it."""
    url = ""
    if config.redis.url is not None:
        # They are settings of a server that Paceline starts.
        changes = {**changes, "redis": type(config.redis)().model_dump()}
        url = 'printf \'\\n[redis]\\nurl = "%s"\\n\' "$REDIS_URL" >> "$config.part"\n'
    text = run_file(config, changes, with_token_file=with_token_file)
    if END_OF_FILE in text.splitlines():
        raise BadInput(f"a setting contains the line {END_OF_FILE}, which ends the run file")
    return f"""\
cat > "$config.part" << '{END_OF_FILE}'
{text}{END_OF_FILE}
{url}mv "$config.part" "$config"
"""
