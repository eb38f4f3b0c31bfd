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
    from paceline.observe.curves import duration
    from paceline.observe.runs import find_runs

    if not directory.is_dir():
        raise BadInput(f"{directory}: no such directory")
    found = find_runs(directory)
    if as_json:
        print_json([run.to_json() for run in found])
    elif not found:
        typer.echo(f"no runs in {directory}")
    else:
        ages = [f"{duration(max(0.0, time.time() - run.changed))} ago" for run in found]
        _print(found, ages, "changed")


def compare(
    run_dirs: list[Path],
    *,
    metric: str = "reward_mean",
    as_json: JsonOption = False,
) -> None:
    """Print the final numbers of several runs and the settings that differ.

    With --json, the curves are printed too.

    Example: paceline compare runs/a runs/b --metric eval_reward_mean

    Args:
        run_dirs RUN_DIR...: Directories of two or more runs.
        metric NAME: Metric to compare.
    """
    from paceline.observe.projection import Projection
    from paceline.observe.runs import read_run, settings_that_differ
    from paceline_launcher.run_handle import attach

    if len(run_dirs) < 2:
        raise BadInput("compare needs two runs or more: paceline compare RUN_DIR RUN_DIR")
    records = [Projection.read(attach(path).path) for path in run_dirs]
    curves = [
        # (step, value) in order of steps, on the surviving line
        [(e["step"], e[metric]) for e in record.evals if e.get(metric) is not None]
        if metric.startswith("eval_")
        else record.metrics.column(metric)
        for record in records
    ]
    if not any(curves):
        known = ", ".join(sorted(set().union(*(one.metric_names for one in records)))) or "none"
        raise BadInput(f"--metric {metric}: no run has it. Choose from: {known}")
    found = [read_run(path) for path in run_dirs]
    settings = settings_that_differ(run_dirs)
    if as_json:
        both = zip(found, curves, strict=True)
        listed = [{**run.to_json(), "curve": curve} for run, curve in both]
        print_json({"metric": metric, "settings": settings, "runs": listed})
        return
    _print(found, [f"{c[-1][1]:.4g}" if c else "-" for c in curves], f"last {metric}")
    if settings:
        rows = [(name, *values) for name, values in settings.items()]
        out_console().print("", table("|".join(["setting", *map(str, run_dirs)]), rows))


def _print(found: list[Run], last: list[str], title: str) -> None:
    from paceline.observe.curves import duration

    def span(first: float | None, last: float | None) -> str:
        return "-" if first is None or last is None else f"{short(first)} → {short(last)}"

    rows = [
        (
            *(run.path, run.state, run.steps, span(run.reward_first5, run.reward_last5)),
            *(span(run.eval_first, run.eval_last), run.samples_per_s),
            *(None if run.wall_s is None else duration(run.wall_s), cell),
        )
        for run, cell in zip(found, last, strict=True)
    ]
    columns = f"run|state|>steps|>reward|>held out|>samples/s|>took|>{title}"
    out_console().print(table(columns, rows))
    for run in found:
        if run.state in ("failed", "damaged") and run.reason:
            typer.echo(printable(f"{run.path} {run.state}: {run.reason.partition(chr(10))[0]}"))
