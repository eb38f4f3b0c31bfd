"""``paceline render | controller | policy | rollout | scorer | wait``: files that start a run on a
scheduler, one process of a role, on any machine, and the wait for the run's end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from paceline.config.load import load_config
from paceline.errors import BadInput
from paceline.process.worker_command import THREAD_VARIABLES
from paceline.rpc.addresses import port_of
from paceline.user_code import python_module
from paceline_launcher.cli.common import (
    ConfigArgument,
    JsonOption,
    RunDirOption,
    SetOption,
    parse_addresses,
    print_json,
)
from paceline_launcher.cli.up import print_outcome, steps_to_extend_to
from paceline_launcher.render.options import RenderOptions

if TYPE_CHECKING:
    from paceline.config.schema import Config


TARGETS = ("kubernetes", "pytorchjob", "pai-dlc", "ray", "slurm")


def render(
    config: ConfigArgument,
    *,
    options: RenderOptions,
    target: Annotated[str, typer.Option(autocompletion=lambda: list(TARGETS))],
    out: str = "",
    force: bool = False,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the files that start a run on Kubernetes, as a PyTorchJob, on PAI-DLC, Ray or Slurm.

    Counts, names and resources follow from the configuration; the options are what it does not say.
    Secrets are in none of the files. docs/clusters.md shows the commands that use them.

    Example: paceline render run.toml --target kubernetes --image registry/paceline:0.1.0
    --gpus-per-node 8

    Example: paceline render run.toml --target slurm --gpus-per-node 8 --partition gpu

    Args:
        target NAME: kubernetes, pytorchjob, pai-dlc, ray or slurm.
        out DIR: Directory of the files; - for standard output. Default: rendered/TARGET.
        force: Replace existing files.
    """
    from paceline_launcher.render.request import RenderRequest
    from paceline_launcher.render.targets import rendered, write_files

    files = rendered(target, RenderRequest(load_config(config, overrides or ()), options))
    if out == "-":
        if as_json:
            print_json({"target": target, "written": None, "files": files})
        else:
            texts = (f"# ---- {name}\n{text}" for name, text in files.items())
            typer.echo("\n".join(texts), nl=False)
        return
    paths = write_files(files, Path(out or f"rendered/{target}"), force=force)
    if as_json:
        print_json({"target": target, "written": [str(path) for path in paths]})
        return
    for path in paths:
        typer.echo(f"wrote {path}")
    typer.echo(f"next: docs/clusters.md, section {target}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Options by which a process finds its run.

    Args:
        controllers HOST:PORT,...: Addresses of all controllers of the run; every process gets the
            same list.
        token_file FILE: File with the run's token, in place of auth.token_file.
    """

    controllers: str
    run_dir: RunDirOption = None
    token_file: Path | None = None
    overrides: SetOption = None

    def read(self, config: Path) -> tuple[Config, list[str], Path]:
        """Settings, addresses of the controllers, and run directory. Raises BadInput."""
        settings = load_config(config, self._overrides())
        directory = self.run_dir or Path("runs") / settings.run.name
        return settings, parse_addresses(self.controllers), directory

    def become(self, module: str, config: Path, arguments: list[str]) -> NoReturn:
        """Replaces this process: signals and the exit status are the role's own."""
        for variable in THREAD_VARIABLES:
            # A worker replaces it by its number in the configuration.
            os.environ.setdefault(variable, "1")
        settings = [part for override in self._overrides() for part in ("--set", override)]
        sys.stdout.flush()
        argv = [*python_module(module), str(config), *arguments, *settings]
        os.execv(sys.executable, argv)

    def _overrides(self) -> list[str]:
        named = f"auth.token_file={json.dumps(str(self.token_file))}"
        return [*(self.overrides or ()), *([] if self.token_file is None else [named])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """Options of a worker.

    Args:
        identity --id: Name of this process, unique in the run.
        tensor_host ADDRESS: Address of this machine at which other workers reach this one. Default:
            found out.
    """

    identity: str | None = None
    tensor_host: str | None = None

    def become(self, role: str, config: Path, given: Given, scorer: str = "") -> NoReturn:
        _, addresses, directory = given.read(config)
        # The process id: two workers of one name would replace each other.
        host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())[:40]
        pool = f"{role}-{scorer}" if scorer else role
        name = self.identity or f"{pool}-{host}-{os.getpid()}"
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
            raise BadInput(f"--id {name}: use at most 64 letters, digits, '-', '_' and '.'")
        arguments = ["--controllers", ",".join(addresses), "--id", name]
        arguments += ["--run-dir", str(directory)]
        arguments += ["--tensor-host", self.tensor_host] if self.tensor_host is not None else []
        arguments += ["--scorer", scorer] if scorer else []
        given.become(f"{role}_worker", config, arguments)


def controller(
    config: ConfigArgument, *, given: Given, index: Annotated[int, typer.Option(min=0)] = 0
) -> None:
    """Start one controller. The election decides whether it leads or stands by.

    Controllers on several machines need redis.url, auth.token_file, and a controller.host that is
    not loopback.

    Example: paceline controller run.toml --controllers a:7000,b:7000 --index 0

    Args:
        index: Position of this controller in --controllers, from 0.
    """
    _, addresses, directory = given.read(config)
    if index >= len(addresses):
        raise BadInput(
            f"--index {index}: --controllers names {len(addresses)} addresses; the first has index "
            "0"
        )
    port = port_of(addresses[index])
    arguments = ["--run-dir", str(directory), "--id", f"controller-{index}", "--port", str(port)]
    if port:
        arguments += ["--advertise", addresses[index].rpartition(":")[0].strip("[]")]
    given.become("controller", config, arguments)


def policy(config: ConfigArgument, *, given: Given, worker: Worker) -> None:
    """Start one policy replica, with all its ranks on this machine, or one rank of it under
    torchrun.

    Example: paceline policy run.toml --controllers a:7000,b:7000 --id policy-2
    """
    worker.become("policy", config, given)


def rollout(config: ConfigArgument, *, given: Given, worker: Worker) -> None:
    """Start one rollout worker.

    Example: paceline rollout run.toml --controllers a:7000,b:7000
    """
    worker.become("rollout", config, given)


def scorer(
    config: ConfigArgument, *, given: Given, worker: Worker, name: str | None = None
) -> None:
    """Start one worker of a scorer.

    Example: paceline scorer run.toml --scorer helpful --controllers a:7000,b:7000

    Args:
        name --scorer NAME: Section [scorers.NAME] of the file. It may be left out if there is only
            one.
    """
    known = list(given.read(config)[0].scorers.by_name)
    chosen = name or (known[0] if len(known) == 1 else "")
    if chosen not in known:
        raise BadInput(
            f"--scorer {chosen}: the scorers of {config} are {', '.join(known) or 'none'}. Name "
            "one, or add a section [scorers.NAME]"
        )
    worker.become("scorer", config, given, chosen)


def wait(config: ConfigArgument, *, given: Given, as_json: JsonOption = False) -> None:
    """Wait until a run ends, then write summary.json and the exported model into its directory.

    For runs whose controllers and workers a scheduler starts: `paceline up` and `paceline node` do
    it themselves. Exit status: 0 if the run has finished and its model is exported, 130 if it
    was interrupted, else 1.

    Example: paceline wait run.toml --controllers a:7000,b:7000 --run-dir /shared/runs/demo
    """
    from paceline_launcher.launch.ending import exit_status

    settings, addresses, directory = given.read(config)
    summary = asyncio.run(_end(settings, directory, addresses))
    if as_json:
        print_json({**summary, "run_dir": str(directory)})
    else:
        print_outcome(summary, directory)
    raise typer.Exit(exit_status(summary))


async def _end(settings: Config, directory: Path, addresses: list[str]) -> dict[str, Any]:
    from paceline.rpc.client import ControlPlane
    from paceline_launcher.launch.ending import RunWait

    control = ControlPlane.from_config(settings, addresses, directory)
    note = partial(typer.echo, err=True)
    try:
        extends_to = steps_to_extend_to(settings, directory)
        (directory / "summary.json").unlink(missing_ok=True)
        return await RunWait(settings, directory, control, note, extends_to).end()
    finally:
        await control.close()
