"""``paceline controller | policy | rollout | scorer | wait``: one process of a role, on any
machine, and the wait for the run's end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from paceline.errors import BadInput
from paceline.process.user_code import python_module
from paceline.process.worker_command import THREAD_VARIABLES
from paceline.rpc.addresses import port_of
from paceline_launcher.cli.common import (
    ConfigArgument,
    JsonOption,
    RunDirOption,
    SetOption,
    parse_addresses,
    print_json,
)

if TYPE_CHECKING:
    from paceline.config.schema import Config

Controllers = Annotated[
    str,
    typer.Option(
        "--controllers",
        metavar="HOST:PORT,...",
        help="Addresses of all controllers of the run; every process gets the same list.",
    ),
]
Identity = Annotated[
    str | None, typer.Option("--id", help="Name of this process, unique in the run.")
]
TokenFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="File with the run's token, in place of auth.token_file."),
]
TensorHost = Annotated[
    str | None,
    typer.Option(
        "--tensor-host",
        metavar="ADDRESS",
        help="Address of this machine at which other workers reach this one. Default: found out.",
    ),
]


def controller(
    config: ConfigArgument,
    controllers: Controllers,
    index: Annotated[
        int, typer.Option(min=0, help="Position of this controller in --controllers, from 0.")
    ] = 0,
    run_dir: RunDirOption = None,
    token_file: TokenFile = None,
    overrides: SetOption = None,
) -> None:
    """Start one controller. The election decides whether it leads or stands by.

    Controllers on several machines need redis.url, auth.token_file, and a controller.host that is
    not loopback.

    Example: paceline controller run.toml --controllers a:7000,b:7000 --index 0
    """
    from paceline.config.load import load_config

    overrides = _with_token(overrides, token_file)
    settings = load_config(config, overrides)
    addresses = parse_addresses(controllers)
    if index >= len(addresses):
        raise BadInput(
            f"--index {index}: --controllers names {len(addresses)} addresses; the first has index "
            "0"
        )
    directory = run_dir or Path("runs") / settings.run.name
    arguments = ["--run-dir", str(directory), "--id", f"controller-{index}"]
    port = port_of(addresses[index])
    arguments += ["--port", str(port)]
    if port:
        arguments += ["--advertise", addresses[index].rpartition(":")[0].strip("[]")]
    _become("controller", config, arguments, overrides)


def _worker(role: str, help_text: str) -> Callable[..., None]:

    def command(
        config: ConfigArgument,
        controllers: Controllers,
        identity: Identity = None,
        tensor_host: TensorHost = None,
        run_dir: RunDirOption = None,
        token_file: TokenFile = None,
        overrides: SetOption = None,
    ) -> None:
        from paceline.config.load import load_config

        overrides = _with_token(overrides, token_file)
        settings = load_config(config, overrides)
        arguments = _arguments(settings, role, controllers, identity, tensor_host, run_dir)
        _become(f"{role}_worker", config, arguments, overrides)

    command.__name__, command.__doc__ = role, help_text
    return command


def _arguments(
    settings: Config,
    role: str,
    controllers: str,
    identity: str | None,
    tensor_host: str | None,
    run_dir: Path | None,
) -> list[str]:
    addresses = ",".join(parse_addresses(controllers))
    # The process id: two workers of one name would replace each other.
    host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())[:40]
    name = identity or f"{role}-{host}-{os.getpid()}"
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
        raise BadInput(f"--id {name}: use at most 64 letters, digits, '-', '_' and '.'")
    directory = run_dir or Path("runs") / settings.run.name
    reached = () if tensor_host is None else ("--tensor-host", tensor_host)
    return ["--controllers", addresses, "--id", name, "--run-dir", str(directory), *reached]


policy = _worker(
    "policy",
    "Start one policy replica, with all its ranks on this machine, or one rank of it under "
    "torchrun.\n\n"
    "Example: paceline policy run.toml --controllers a:7000,b:7000 --id policy-2",
)
rollout = _worker(
    "rollout",
    "Start one rollout worker.\n\nExample: paceline rollout run.toml --controllers a:7000,b:7000",
)


def scorer(
    config: ConfigArgument,
    controllers: Controllers,
    name: Annotated[
        str | None,
        typer.Option(
            "--scorer",
            metavar="NAME",
            help="Section [scorers.NAME] of the file. It may be left out if there is only one.",
        ),
    ] = None,
    identity: Identity = None,
    tensor_host: TensorHost = None,
    run_dir: RunDirOption = None,
    token_file: TokenFile = None,
    overrides: SetOption = None,
) -> None:
    """Start one worker of a scorer.

    Example: paceline scorer run.toml --scorer helpful --controllers a:7000,b:7000
    """
    from paceline.config.load import load_config

    overrides = _with_token(overrides, token_file)
    settings = load_config(config, overrides)
    known = list(settings.scorers.by_name)
    if not known:
        raise BadInput(f"{config}: it has no scorer. Add a section [scorers.NAME]")
    if name is None and len(known) > 1:
        raise BadInput(f"--scorer is missing: the scorers are {', '.join(known)}")
    chosen = name or known[0]
    if chosen not in known:
        raise BadInput(f"--scorer {chosen}: the scorers are {', '.join(known)}")
    pool = f"scorer-{chosen}"
    arguments = _arguments(settings, pool, controllers, identity, tensor_host, run_dir)
    _become("scorer_worker", config, [*arguments, "--scorer", chosen], overrides)


def _with_token(overrides: list[str] | None, token_file: Path | None) -> list[str]:
    named = [] if token_file is None else [f"auth.token_file={json.dumps(str(token_file))}"]
    return [*(overrides or ()), *named]


def _become(
    module: str, config: Path, arguments: list[str], overrides: list[str] | None
) -> NoReturn:
    """Replaces this process: signals and the exit status are the role's own."""
    for variable in THREAD_VARIABLES:
        # A worker replaces it by its number in the configuration.
        os.environ.setdefault(variable, "1")
    settings = [part for override in overrides or () for part in ("--set", override)]
    sys.stdout.flush()
    argv = [*python_module(module), str(config), *arguments, *settings]
    os.execv(sys.executable, argv)


def wait(
    config: ConfigArgument,
    controllers: Annotated[
        str,
        typer.Option(metavar="HOST:PORT,...", help="Addresses of all controllers of the run."),
    ],
    run_dir: RunDirOption = None,
    token_file: TokenFile = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Wait until a run ends, then write summary.json and the exported model into its directory.

    For runs whose controllers and workers a scheduler starts: `paceline up` and `paceline node` do
    it themselves. Exit status: 0 if the run has finished and its model is exported, 1 if it failed.

    Example: paceline wait run.toml --controllers a:7000,b:7000 --run-dir /shared/runs/demo
    """
    from paceline.config.load import load_config

    overrides = _with_token(overrides, token_file)
    settings = load_config(config, overrides)
    directory = run_dir or Path("runs") / settings.run.name
    summary = asyncio.run(_end(settings, directory, parse_addresses(controllers)))
    if as_json:
        print_json({**summary, "run_dir": str(directory)})
    else:
        path = directory / "summary.json"
        typer.echo(f"{summary['status']} after {summary['steps']} steps: {path}")
        if summary["export"]:
            typer.echo(f"exported model: {summary['export']}")
    if summary["status"] != "finished":
        typer.echo(f"error: {summary['reason']}", err=True)
        raise typer.Exit(1)


async def _end(settings: Config, directory: Path, addresses: list[str]) -> dict[str, Any]:
    from paceline.rpc.client import ControlPlane
    from paceline_launcher.cli.control.up import steps_to_extend_to
    from paceline_launcher.launch.ending import RunWait

    control = ControlPlane.from_config(settings, addresses, directory)
    try:
        extends_to = steps_to_extend_to(settings, directory)
        (directory / "summary.json").unlink(missing_ok=True)
        note = _note
        return await RunWait(settings, directory, control, note, extends_to).end()
    finally:
        await control.close()


def _note(line: str) -> None:
    typer.echo(line, err=True)
