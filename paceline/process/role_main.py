"""Command line of a worker role: the arguments that policy and rollout workers share."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.config.schema import Config


@dataclass(frozen=True, slots=True)
class RoleOptions:
    """The parsed command line."""

    config: Config
    controllers: list[str]
    """host:port of each."""
    worker_id: str
    run_dir: Path | None
    tensor_host: str | None


def role_main(
    role: str,
    description: str | None,
    run: Callable[[RoleOptions], int],
    *,
    threads: Callable[[Config], int],
    run_dir_help: str,
    arguments: list[str] | None = None,
) -> int:
    """Parses the command line and calls ``run``; returns its exit status, or 2 for a bad config.

    ``role``: policy or rollout. ``threads``: number of CPU threads that the config allows.
    """
    parser = argparse.ArgumentParser(prog=f"{role}_worker", description=description)
    parser.add_argument("config", type=Path, help="TOML file of the run")
    parser.add_argument("--controllers", required=True, help="host:port of each, comma-separated")
    parser.add_argument("--id", default=f"{role}-0", help="stable name of this worker")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", dest="overrides")
    parser.add_argument("--run-dir", type=Path, help=run_dir_help)
    parser.add_argument(
        "--tensor-host",
        help="address at which other workers reach this one; default: the one on the way to the "
        "controller",
    )
    options = parser.parse_args(arguments)

    from paceline.config.errors import ConfigError
    from paceline.config.load import load_config

    try:
        config = load_config(options.config, options.overrides)
    except ConfigError as error:
        print(f"{role}_worker: {error}", file=sys.stderr)
        return 2
    # Before ``run`` imports torch: its thread pools are sized once.
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads(config))
    controllers = [a.strip() for a in options.controllers.split(",") if a.strip()]
    return run(RoleOptions(config, controllers, options.id, options.run_dir, options.tensor_host))
