"""Targets that start a run with shell scripts: slurm and ray."""

import math
from typing import Any

from paceline.errors import BadInput
from paceline.worker_pools import POLICY, ROLLOUT, SCORER
from paceline_launcher.render.options import limit_minutes
from paceline_launcher.render.request import RenderRequest
from paceline_launcher.render.run_file import script_run_file
from paceline_launcher.render.templates import Templates

STOP_SPARE_S = 60
"""Slurm may signal a job a minute early."""


def slurm(request: RenderRequest) -> dict[str, str]:
    """One batch script, with `paceline node` on every node. Raises BadInput."""
    limit = request.options.time_limit
    stop_s = math.ceil(request.config.fleet.stop_s) + STOP_SPARE_S
    minutes = limit_minutes(limit)
    if minutes is not None and minutes * 60 <= stop_s:
        raise BadInput(
            f"--time-limit {limit}: the run is asked to stop {stop_s} s before its end "
            "(fleet.stop_s), so nothing would be trained. Give more"
        )
    for option in ("partition", "account"):
        if len((getattr(request.options, option) or "x").split()) != 1:
            raise BadInput(f"--{option}: a value of a Slurm option has no space")
    text = script_run_file(request.config, {"fleet": {"provider": "local"}}, with_token_file=True)
    secrets = request.controller_secrets()
    templates = Templates(request, target="slurm", run_toml=text, secrets=secrets, stop_s=stop_s)
    return {"job.sbatch": templates.text("slurm/job.sbatch")}


def ray(request: RenderRequest) -> dict[str, str]:
    """A job for `ray job submit` whose entrypoint has Redis and the controllers. Raises BadInput.

    submit.sh ──job──► head: start.sh = paceline node ──Ray──► an actor for each worker
    """
    request.check_workers_fit_nodes()
    gpus = {POLICY: 0, ROLLOUT: 0, SCORER: 0}
    for pool in request.pools:
        gpus[pool.role] = max(gpus[pool.role], pool.gpus)
    changes: dict[str, dict[str, Any]] = {
        "fleet": {"provider": "ray"},
        "ray": {"address": "auto", **{f"{role}_gpus": count for role, count in gpus.items()}},
        "rest": {"port": request.rest_port or 0},
    }
    # Workers are on other machines: what they need is in the environment there, and the token in
    # the run directory.
    elsewhere = request.worker_secrets()
    secrets = {n: s for n, s in request.controller_secrets().items() if n not in elsewhere}
    text = script_run_file(request.config, changes)
    templates = Templates(request, target="ray", run_toml=text, secrets=secrets)
    names = ("start.sh", "runtime-env.yaml", "submit.sh")
    return {name: templates.text(f"ray/{name}") for name in names}
