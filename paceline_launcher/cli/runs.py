"""``paceline runs`` and ``paceline compare``: past runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from paceline.errors import BadInput
from paceline_launcher.cli.common import JsonOption, print_json
from paceline_launcher.terminal import out_console, printable, short, table

if TYPE_CHECKING:
    from paceline.observe.runs import Run


def runs(directory: Path = Path("runs"), *, as_json: JsonOption = False) -> None:
    """List the runs in a directory, the newest first, with their states.

    running: one of its processes runs on this machine. finished, failed, interrupted: the state in
    its summary.json. ended: none of its processes runs here and it has no summary, because it was
    killed or runs elsewhere. damaged: its files cannot be read.

    Example: paceline runs runs

    Args:
        directory DIR: Directory to search, three levels deep.
    """
    from paceline.observe.runs import find_runs

    if not directory.is_dir():
        raise BadInput(f"{directory}: no such directory")
    found = find_runs(directory)
    if as_json:
        print_json([run.to_json() for run in found])
    elif not found:
        typer.echo(f"no runs in {directory}")
    else:
        _print(found)


def compare(run_dirs: list[Path], *, as_json: JsonOption = False) -> None:
    """Print the final numbers of several runs and the settings that differ.

    Example: paceline compare runs/a runs/b

    Args:
        run_dirs RUN_DIR...: Directories of two or more runs.
    """
    from paceline.observe.runs import read_run, settings_that_differ
    from paceline_launcher.run_handle import attach

    if len(run_dirs) < 2:
        raise BadInput("compare needs two runs or more: paceline compare RUN_DIR RUN_DIR")
    found = [read_run(attach(path).path) for path in run_dirs]
    settings = settings_that_differ(run_dirs)
    if as_json:
        print_json({"settings": settings, "runs": [run.to_json() for run in found]})
        return
    _print(found)
    if settings:
        rows = [(name, *values) for name, values in settings.items()]
        out_console().print("", table("|".join(["setting", *map(str, run_dirs)]), rows))


def _print(found: list[Run]) -> None:
    from paceline.observe.curves import duration

    def span(first: float | None, last: float | None) -> str:
        return "-" if first is None or last is None else f"{short(first)} → {short(last)}"

    rows = [
        (
            *(run.path, run.state, run.steps, span(run.reward_first5, run.reward_last5)),
            *(span(run.eval_first, run.eval_last), run.samples_per_s),
            None if run.wall_s is None else duration(run.wall_s),
            f"{duration(max(0.0, time.time() - run.changed))} ago",
        )
        for run in found
    ]
    columns = "run|state|>steps|>reward|>held out|>samples/s|>took|>changed"
    out_console().print(table(columns, rows))
    for run in found:
        if run.state in ("failed", "damaged") and run.reason:
            typer.echo(printable(f"{run.path} {run.state}: {run.reason.partition(chr(10))[0]}"))
