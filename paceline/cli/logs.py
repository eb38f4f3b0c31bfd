"""``paceline logs``."""

from __future__ import annotations

import difflib
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.common import JsonOption, RunDirOption, print_json, print_json_line
from paceline.console.terminal import printable
from paceline.errors import BadInput

DEFAULT_LINES = 50


def _complete_names(context: typer.Context, incomplete: str) -> list[str]:
    from paceline.run_view.log_files import log_files

    run_dir = context.params.get("run_dir")
    return [] if run_dir is None else sorted(log_files(Path(run_dir)))


def logs(
    process: Annotated[
        str | None,
        typer.Argument(
            metavar="PROCESS",
            help="For example policy-0, controller-1 or redis. Default: list all that have a log.",
            autocompletion=_complete_names,
        ),
    ] = None,
    run_dir: RunDirOption = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines until the run ends.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", metavar="N", min=0, help="Start with the last N lines.")
    ] = DEFAULT_LINES,
    as_json: JsonOption = False,
) -> None:
    """Print the log of a process.

    The file outlives the process: one that is killed and started again continues the same file. With
    --json, each line is an object with the fields process and line.

    Example: paceline logs rollout-0 --run-dir runs/demo --follow
    """
    from paceline.run_view.log_files import last_lines, log_files, new_lines

    if run_dir is None:
        raise BadInput("give --run-dir DIR: logs are in the directory of a run")
    if not run_dir.is_dir():
        raise BadInput(f"--run-dir: {run_dir}: no such directory")
    known = log_files(run_dir)
    if process is None:
        _list(known, as_json)
        return
    if process not in known:
        raise BadInput(_unknown(process, known, run_dir))
    safe = sys.stdout.isatty()

    def put(line: str) -> None:
        if as_json:
            print_json_line({"process": process, "line": line})
        else:
            typer.echo(printable(line) if safe else line)

    shown, offset = last_lines(known[process], lines)
    for line in shown:
        put(line)
    for line in new_lines(
        known[process], offset, partial(_over, run_dir) if follow else lambda: True
    ):
        put(line)


def _list(known: dict[str, Path], as_json: bool) -> None:
    if as_json:
        sizes = {name: path.stat().st_size for name, path in known.items()}
        print_json([{"process": n, "bytes": size} for n, size in sizes.items()])
        return
    for name in known:
        typer.echo(name)


def _unknown(process: str, known: dict[str, Path], run_dir: Path) -> str:
    if not known:
        return f"{run_dir} has no logs: `paceline up` has not started a process in it"
    near = difflib.get_close_matches(process, known, 1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"no process {process[:64]!r} wrote a log.{hint} There are: {', '.join(known)}"


def _over(run_dir: Path) -> bool:
    from paceline.run_view.fleet_file import FleetRecord

    record = FleetRecord.read(run_dir)
    # Without a record the processes were started by hand, and nothing tells when they are done.
    return record is not None and not record.supervisor.alive() and not record.survivors()
