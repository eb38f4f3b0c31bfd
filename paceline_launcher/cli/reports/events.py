"""``paceline events`` and ``paceline logs``: what a run and its processes have written."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import BadInput
from paceline.observe.vocabulary import EventType
from paceline_launcher.cli.common import (
    JsonOption,
    RunDirOption,
    Target,
    given_or_default,
    print_json,
    print_json_line,
    takes_target,
)
from paceline_launcher.terminal import printable

if TYPE_CHECKING:
    from paceline.rpc.client import ControlPlane

OVER_S = 1.5  # for a controller to answer if the run directory says that the run has ended
DEFAULT_LINES = 50
POSITION = r"(\d{1,20}(-\d{1,20})?)?"


@takes_target
def events(
    target: Target,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new events as they happen.")
    ] = False,
    after: Annotated[
        str, typer.Option(metavar="POSITION", help="Start after this journal position.")
    ] = "",
    all_kinds: Annotated[
        bool, typer.Option("--all", help="Print every journal event, leases and votes included.")
    ] = False,
    kinds: Annotated[
        list[str] | None,
        typer.Option(
            "--kind", metavar="KIND", help="Only this kind, such as WorkerDied; may be repeated."
        ),
    ] = None,
    faults: Annotated[bool, typer.Option("--faults", help="Only warnings and errors.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the events of a run, the oldest first.

    Without --follow and --all the run directory is enough, even after the run has ended. Steps that
    were committed one after the other are then printed in one line; --kind StepCommitted prints
    each.

    Example: paceline events --run-dir runs/demo --follow
    """
    if not re.fullmatch(POSITION, after):
        raise BadInput(f"--after: {after} is no journal position, such as 1763711975123-0")
    chosen = frozenset(kinds or ())

    def wanted(event: Mapping[str, Any]) -> bool:
        fault = event.get("severity") in ("warning", "error")
        return (fault or not faults) and (not chosen or event["type"] in chosen)

    if target.run_dir is not None and not (follow or all_kinds):
        _from_file(target.run_dir, after, as_json, chosen, wanted)
        return
    from paceline.observe.event_follower import answers, follow_events
    from paceline.observe.event_history import is_listed
    from paceline.rpc.client import ControlPlaneUnavailable
    from paceline.v1 import admin_pb2

    async def watch(control: ControlPlane) -> None:
        async for position, event in records(control):
            if (all_kinds or is_listed(event)) and wanted(event):
                # The run's files call it t.
                at = {"t": round(event["at"], 3)} if "at" in event else {}
                _print({"position": position, **at, **event}, as_json)

    async def records(control: ControlPlane) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        if follow:
            async for found in follow_events(control, after):
                yield found
            return
        request = admin_pb2.WatchRequest(after=after)
        async for record in control.stream("AdminService.WatchEvents", request):
            yield record.position, json.loads(record.json)

    last = target.last_known()
    if not last or target.ask(lambda control: answers(control, OVER_S)) is not None:
        target.ask(watch)
    elif all_kinds:
        raise ControlPlaneUnavailable(
            f"the run in {target.run_dir} is not running: {last}. "
            "Its files have the events without --all"
        )
    else:
        # The run is over: its files hold all of its listed events.
        assert target.run_dir is not None
        _from_file(target.run_dir, after, as_json, chosen, wanted)


def _from_file(
    run_dir: Path,
    after: str,
    as_json: bool,
    chosen: frozenset[str],
    wanted: Callable[[Mapping[str, Any]], bool],
) -> None:
    from paceline.observe.event_history import position_key
    from paceline.observe.json_lines import read_lines

    path = run_dir / "events.jsonl"
    if not path.is_file():
        raise BadInput(f"--run-dir: {run_dir} has no events.jsonl: not a run directory")
    steps: list[dict[str, Any]] = []
    known: set[str] = set()
    for event in read_lines(path):
        known.add(event["type"])
        if after and position_key(event["position"]) <= position_key(after):
            continue
        if not wanted(event):
            continue
        if event["type"] == EventType.STEP_COMMITTED and not as_json and not chosen:
            steps.append(event)
            continue
        _print_steps(steps)
        _print(event, as_json)
    _print_steps(steps)
    if missing := chosen - known:
        typer.echo(
            f"none of kind {', '.join(sorted(missing))}; there are: {', '.join(sorted(known))}",
            err=True,
        )


def _print_steps(steps: list[dict[str, Any]]) -> None:
    """Steps that were committed one after the other, in one line; empties the list."""
    if len(steps) > 1:
        ends = (steps[0]["metrics"], steps[-1]["metrics"])
        first, last = (math.nan if (r := m.get("reward_mean")) is None else r for m in ends)
        text = (
            f"steps {steps[0]['step']} to {steps[-1]['step']} committed, "
            f"reward {first:.3f} to {last:.3f}"
        )
        typer.echo(f"{_clock(steps[-1]['t'])}  {text}")
    elif steps:
        _print(steps[0], as_json=False)
    steps.clear()


def _print(event: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print_json_line(event)
        return
    from paceline.observe.event_history import text_of

    t = event.get("at") or event.get("t")
    typer.echo(f"{_clock(t) if t else '--:--:--'}  {printable(text_of(event))}")


def _clock(t: float) -> str:
    """The time of day, with the date unless it is today: runs take days."""
    at = time.localtime(t)
    today = time.strftime("%Y-%m-%d", at) == time.strftime("%Y-%m-%d")
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S", at)


def _complete_names(context: typer.Context, incomplete: str) -> list[str]:
    from paceline.observe.log_files import log_files

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

    The file outlives the process: one that is killed and started again continues the same file.
    With --json, each line is an object with the fields process and line.

    Example: paceline logs rollout-0 --run-dir runs/demo --follow
    """
    from paceline.observe.log_files import last_lines, log_files, new_lines

    run_dir = given_or_default(run_dir)
    if not run_dir.is_dir():
        raise BadInput(f"--run-dir: {run_dir}: no such directory")
    known = log_files(run_dir)
    if process is None:
        if as_json:
            print_json([{"process": n, "bytes": p.stat().st_size} for n, p in known.items()])
        else:
            for name in known:
                typer.echo(name)
        return
    if process not in known:
        if not known:
            raise BadInput(f"{run_dir} has no logs: `paceline up` has started no process in it")
        there = ", ".join(known)
        raise BadInput(f"no process {process[:64]!r} wrote a log. There are: {there}")
    safe = sys.stdout.isatty()

    def put(line: str) -> None:
        if as_json:
            print_json_line({"process": process, "line": line})
        else:
            typer.echo(printable(line) if safe else line)

    last, offset = last_lines(known[process], lines)
    over = partial(_over, run_dir) if follow else lambda: True
    for line in (*last, *new_lines(known[process], offset, over)):
        put(line)


def _over(run_dir: Path) -> bool:
    from paceline.observe.fleet_file import FleetRecord

    record = FleetRecord.read(run_dir)
    # Without a record the processes were started by hand, and nothing tells when they are done.
    return record is not None and not record.supervisor.alive() and not record.survivors()
