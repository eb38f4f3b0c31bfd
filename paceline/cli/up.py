"""``paceline up``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.common import (
    ConfigArgument,
    JsonOption,
    RunDirOption,
    SetOption,
    print_json,
)

if TYPE_CHECKING:
    from paceline.config.schema import Config
    from paceline.run_view.fleet_file import FleetRecord


def up(
    config: ConfigArgument,
    overrides: SetOption = None,
    run_dir: RunDirOption = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Remove an earlier run in the directory first.")
    ] = False,
    attach: Annotated[
        bool,
        typer.Option(
            "--attach",
            help="Take over the running processes of a fleet whose `paceline up` is gone.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and start nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a whole fleet on this machine, in the foreground, to the end of the run.

    Started again on an unfinished run, it goes on where that one stopped: what an earlier session
    left running is ended first, or, with --attach, taken over without interrupting it. Ctrl-C
    stops every process of the fleet; twice: at once. With --json the view goes to standard error and
    the summary, as JSON, to standard output.

    Example: paceline up demo.toml --set train.steps=50 --run-dir runs/try1
    """
    from paceline.config.load import load_config
    from paceline.run_view.summary import read_summary
    from paceline.supervisor.preflight import PreflightFailed, check
    from paceline.supervisor.run_dir_lock import check_unled, clear, end_leftovers, held

    settings = load_config(config, overrides or ())
    where = (run_dir or Path("runs") / settings.run.name).resolve()
    if attach and fresh:
        raise PreflightFailed(
            "--attach takes a running fleet over, --fresh removes it: give one of them"
        )
    if attach:
        with held(where):
            raise typer.Exit(_run(settings, where, as_json, _fleet_left(settings, where)))
    check(settings, where)
    if dry_run:
        if as_json:
            print_json({"ready": True, "run": settings.run.name, "run_dir": str(where)})
        else:
            typer.echo(f"ready: {_fleet_line(settings)} in {where}")
        return
    with held(where):
        if fresh:
            clear(settings, where)
        summary = read_summary(where)
        if summary is not None and summary.get("status") == "finished":
            # A Redis of the user's own knows a run by its name, wherever its directory is.
            elsewhere = "--run-dir DIR" if settings.redis.url is None else "another run.name"
            raise PreflightFailed(
                f"the run in {where} is finished ({summary.get('steps')} steps). Start anew with "
                f"--fresh, or elsewhere with {elsewhere}"
            )
        left = end_leftovers(where)
        if left:
            line = f"ended {len(left)} processes that an earlier session left behind"
            typer.echo(line, err=as_json)
        if not fresh:
            check_unled(settings)
        raise typer.Exit(_run(settings, where, as_json))


def _fleet_left(settings: Config, where: Path) -> FleetRecord:
    """Record of the fleet in ``where``, which runs without its supervisor. Raises Refused."""
    from paceline.cli.common import run_config
    from paceline.run_view.fleet_file import FleetRecord
    from paceline.supervisor.preflight import PreflightFailed

    record = FleetRecord.read(where)
    known = {p.name for p in record.processes if p.role == "controller"} if record else set()
    wanted = {f"controller-{index}" for index in range(settings.fleet.controllers)}
    if record is None or not record.survivors() or not wanted <= known:
        raise PreflightFailed(
            f"--attach: no fleet runs in {where}. Without --attach the run is started, or goes on"
        )
    if run_config(where) != settings:
        raise PreflightFailed(
            f"--attach: the fleet in {where} runs with other settings (its config.toml). Give the "
            "same ones, or leave --attach away: it is then ended and goes on with the new ones"
        )
    return record


def _run(settings: Config, where: Path, as_json: bool, earlier: FleetRecord | None = None) -> int:
    from rich.console import Console

    from paceline.console.live_view import open_console
    from paceline.run_view.eta import Progress
    from paceline.run_view.run_records import RunRecords
    from paceline.supervisor.up import LocalRun

    (where / "summary.json").unlink(missing_ok=True)
    # A run that goes on begins with the curve it has.
    console = open_console(Console(stderr=as_json), Progress(RunRecords.read(where).metrics))
    console.note(f"{_fleet_line(settings)} in {where}")

    async def run() -> Any:
        return await LocalRun(settings, where, console, earlier).run()

    outcome = asyncio.run(run())
    if as_json:
        print_json({**outcome.summary, "run_dir": str(where)})
    else:
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
    from rich.table import Table
    from rich.text import Text

    from paceline.console.terminal import out_console, printable

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
        # As text: a reason may hold brackets, which a table takes for markup.
        table.add_row(name, Text(printable(shown)))
    out_console().print(table)
    typer.echo(f"summary: {where / 'summary.json'}")
    if summary.get("export"):
        typer.echo(f"exported model: {summary['export']}")
    if status == "interrupted":
        typer.echo("the run is not finished: the same command goes on with it")
    if status == "failed":
        reason = printable(str(summary.get("reason")))
        typer.echo(f"error: {reason} (logs: {where / 'logs'})", err=True)


def register(app: typer.Typer) -> None:
    app.command()(up)
