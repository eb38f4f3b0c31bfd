"""``paceline controller | policy | rollout``: one process of a role, on any machine."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from paceline.cli.common import ConfigArgument, RunDirOption, SetOption, parse_addresses
from paceline.errors import BadInput
from paceline.process.user_code import python_module

Controllers = Annotated[
    str,
    typer.Option(
        "--controllers",
        metavar="HOST:PORT,...",
        help="Addresses of all the run's controllers, the same list for every process.",
        show_default=False,
    ),
]
Identity = Annotated[
    str | None,
    typer.Option("--id", help="Name of this process in the run, unique.", show_default=False),
]


def controller(
    config: ConfigArgument,
    controllers: Controllers,
    index: Annotated[
        int, typer.Option("--index", min=0, help="Which of the addresses this one is, from 0.")
    ] = 0,
    run_dir: RunDirOption = None,
    overrides: SetOption = None,
) -> None:
    """Start one controller: the leader or a hot standby, as the election has it.

    Controllers on several machines need redis.url, a controller.host that is not loopback, and
    auth.token_file.

    Example: paceline controller run.toml --controllers a:7000,b:7000 --index 0
    """
    from paceline.config.load import load_config

    settings = load_config(config, overrides or ())
    addresses = parse_addresses(controllers)
    if index >= len(addresses):
        raise BadInput(f"--index {index}: --controllers names {len(addresses)} addresses, from 0")
    where = run_dir or Path("runs") / settings.run.name
    host, _, port = addresses[index].rpartition(":")
    arguments = ["--run-dir", str(where), "--id", f"controller-{index}", "--port", port]
    arguments += ["--advertise", host.strip("[]")]
    _become("controller", config, arguments, overrides, threads=1)


def policy(
    config: ConfigArgument,
    controllers: Controllers,
    identity: Identity = None,
    run_dir: RunDirOption = None,
    overrides: SetOption = None,
) -> None:
    """Start one policy replica (all its ranks on this machine).

    Example: paceline policy run.toml --controllers a:7000,b:7000 --id policy-2
    """
    _worker("policy", config, controllers, identity, run_dir, overrides)


def rollout(
    config: ConfigArgument,
    controllers: Controllers,
    identity: Identity = None,
    run_dir: RunDirOption = None,
    overrides: SetOption = None,
) -> None:
    """Start one rollout worker.

    Example: paceline rollout run.toml --controllers a:7000,b:7000
    """
    _worker("rollout", config, controllers, identity, run_dir, overrides)


def _worker(
    role: str,
    config: Path,
    controllers: str,
    identity: str | None,
    run_dir: Path | None,
    overrides: list[str] | None,
) -> NoReturn:
    from paceline.config.load import load_config

    settings = load_config(config, overrides or ())
    addresses = parse_addresses(controllers)
    # The process id keeps two workers of one machine apart: equal names would replace each other.
    host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())[:40]
    name = identity or f"{role}-{host}-{os.getpid()}"
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
        raise BadInput(f"--id {name}: letters, digits, '-', '_' and '.', at most 64")
    where = run_dir or Path("runs") / settings.run.name
    arguments = ["--controllers", ",".join(addresses), "--id", name, "--run-dir", str(where)]
    fleet = settings.fleet
    threads = fleet.policy_threads if role == "policy" else fleet.rollout_threads
    _become(f"{role}_worker", config, arguments, overrides, threads)


def _become(
    module: str, config: Path, arguments: list[str], overrides: list[str] | None, threads: int
) -> NoReturn:
    """Replaces this process: signals and the exit status are the role's own."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, str(threads))
    changed = [part for override in overrides or () for part in ("--set", override)]
    sys.stdout.flush()
    argv = [*python_module(module), str(config), *arguments, *changed]
    os.execv(sys.executable, argv)


def register(app: typer.Typer) -> None:
    app.command()(controller)
    app.command()(policy)
    app.command()(rollout)
