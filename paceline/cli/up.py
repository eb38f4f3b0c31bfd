"""``paceline up``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.common import ConfigArgument, RunDirOption, SetOption

if TYPE_CHECKING:
    from paceline.config.schema import Config


def up(
    config: ConfigArgument,
    overrides: SetOption = None,
    run_dir: RunDirOption = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Remove an earlier run in the directory first.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and start nothing.")
    ] = False,
) -> None:
    """Run a whole fleet on this machine, in the foreground, to the end of the run.

    Started again on an unfinished run, it goes on where that one stopped. Ctrl-C stops every
    process it started; twice: at once.

    Example: paceline up demo.toml --set train.steps=50 --run-dir runs/try1
    """
    from paceline.config.load import load_config
    from paceline.summary import read_summary
    from paceline.supervisor.door import Refused, check
    from paceline.supervisor.ground import clear, end_leftovers, held

    settings = load_config(config, overrides or ())
    where = (run_dir or Path("runs") / settings.run.name).resolve()
    check(settings, where)
    if dry_run:
        typer.echo(f"ready: {_fleet_line(settings)} in {where}")
        return
    with held(where):
        if fresh:
            clear(settings, where)
        summary = read_summary(where)
        if summary is not None and summary.get("status") == "finished":
            raise Refused(
                f"the run in {where} is finished ({summary.get('steps')} steps). Start anew with "
                "--fresh, or elsewhere with --run-dir DIR"
            )
        left = end_leftovers(where)
        if left:
            typer.echo(f"ended {len(left)} processes that an earlier session left behind")
        raise typer.Exit(_run(settings, where))


def _run(settings: Config, where: Path) -> int:
    from paceline.console import open_console
    from paceline.supervisor.up import LocalRun

    (where / "summary.json").unlink(missing_ok=True)
    console = open_console()
    console.note(f"{_fleet_line(settings)} in {where}")

    async def run() -> Any:
        return await LocalRun(settings, where, console).run()

    outcome = asyncio.run(run())
    _print_outcome(outcome.summary, outcome.status, where)
    return int(outcome.exit_code)


def _fleet_line(settings: Config) -> str:
    fleet = settings.fleet
    ranks = f" of {fleet.policy_ranks} ranks" if fleet.policy_ranks > 1 else ""
    return (
        f"{settings.run.name}: {fleet.controllers} controllers, {fleet.policy} policy replicas"
        f"{ranks}, {fleet.rollout} rollout workers"
    )


def _print_outcome(summary: dict[str, Any], status: str, where: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    for name, value in summary.items():
        if value is None or value == [] or value == {}:
            continue
        if isinstance(value, float):
            shown = f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
        elif isinstance(value, dict):
            parts = (
                f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in value.items()
            )
            shown = ", ".join(parts)
        else:
            shown = str(value)
        table.add_row(name, shown)
    Console(soft_wrap=True).print(table)
    typer.echo(f"summary: {where / 'summary.json'}")
    if summary.get("export"):
        typer.echo(f"exported model: {summary['export']}")
    if status == "interrupted":
        typer.echo("the run is not finished: the same command goes on with it")
    if status == "failed":
        typer.echo(f"error: {summary.get('reason')} (logs: {where / 'logs'})", err=True)


def register(app: typer.Typer) -> None:
    app.command()(up)
