"""``paceline wait``: until a run ends whose processes a scheduler started."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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


def wait(
    config: ConfigArgument,
    controllers: Annotated[
        str,
        typer.Option(metavar="HOST:PORT,...", help="Addresses of all controllers of the run."),
    ],
    run_dir: RunDirOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Wait until a run ends, then write summary.json and the exported model into its directory.

    For runs whose controllers and workers a scheduler starts: `paceline up` and `paceline node` do
    it themselves. Exit status: 0 if the run has finished and its model is exported, 1 if it failed.

    Example: paceline wait run.toml --controllers a:7000,b:7000 --run-dir /shared/runs/demo
    """
    from paceline.config.load import load_config

    settings = load_config(config, overrides or ())
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
    from paceline_launcher.launch.run_wait import RunWait

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
