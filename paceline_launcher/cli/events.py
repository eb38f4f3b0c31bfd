"""``paceline events`` and ``paceline logs``: what a run and its processes have written."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import BadInput, Unreachable
from paceline.observe.run_files import read_lines
from paceline.observe.vocabulary import AT_EVERY_STEP, EventType
from paceline_launcher.cli.common import (
    JsonOption,
    RunDirOption,
    Target,
    given_or_default,
    print_json,
)
from paceline_launcher.terminal import printable

if TYPE_CHECKING:
    from paceline.rpc.client import ControlPlane


def events(
    *,
    target: Target,
    follow: bool = False,
    all_kinds: bool = False,
    kinds: list[EventType] | None = None,
    faults: bool = False,
    as_json: JsonOption = False,
) -> None:
    """Print the events of a run, the oldest first.

    Without --follow and --all the run directory is enough, even after the run has ended. Committed
    steps are then left out: --kind StepCommitted prints them.

    Example: paceline events --run-dir runs/demo --follow

    Args:
        follow --follow -f: Print new events as they happen.
        all_kinds --all: Print every journal event, leases and votes included.
        kinds --kind KIND: Only this kind, such as WorkerDied; may be repeated.
        faults: Only warnings and errors.
    """
    from paceline.observe.event_history import is_listed
    from paceline.observe.run_watcher import follow_events

    def wanted(event: Mapping[str, Any]) -> bool:
        fault = event.get("severity") in ("warning", "error")
        return (fault or not faults) and (not kinds or event["type"] in kinds)

    async def watch(control: ControlPlane) -> None:
        async for event in follow_events(control, follow=follow):
            if (all_kinds or is_listed(event)) and wanted(event):
                # The run's files call it t.
                at = {"t": round(event["at"], 3)} if "at" in event else {}
                _print({"position": event["position"], **at, **event}, as_json)

    live = target.run_dir is None or follow or all_kinds
    if live and not target.over:
        target.ask(watch)
        return
    if all_kinds:
        raise Unreachable(f"{target.told_of_end()}. Without --all its files have the events")
    # The files of a run hold all of its listed events.
    assert target.run_dir is not None
    path = target.run_dir / "events.jsonl"
    if not path.is_file():
        raise BadInput(f"--run-dir: {target.run_dir} has no events.jsonl: not a run directory")
    steps_too = as_json or kinds
    for event in read_lines(path):
        if wanted(event) and (steps_too or event["type"] not in AT_EVERY_STEP):
            _print(event, as_json)


def _print(event: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(event, indent=None)
        return
    from paceline.observe.event_history import text_of

    clock = "--:--:--"
    if t := event.get("at") or event.get("t"):
        # With the date unless it is today's: runs take days.
        at = time.localtime(t)
        today = time.strftime("%Y-%m-%d", at) == time.strftime("%Y-%m-%d")
        clock = time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S", at)
    typer.echo(f"{clock}  {printable(text_of(event))}")


def logs(
    process: str | None = None,
    *,
    run_dir: RunDirOption = None,
    follow: bool = False,
    lines: Annotated[int, typer.Option(min=0)] = 50,
) -> None:
    """Print the log of a process.

    The file outlives the process: one that is killed and started again continues the same file.

    Example: paceline logs rollout-0 --run-dir runs/demo --follow

    Args:
        process PROCESS: For example policy-0, controller-1 or redis. Default: list all that have a
            log.
        follow --follow -f: Print new lines until the run ends.
        lines --lines -n N: Start with the last N lines.
    """
    from paceline.observe.file_tail import log_files
    from paceline.observe.fleet_file import FleetRecord

    run_dir = given_or_default(run_dir)
    if not run_dir.is_dir():
        raise BadInput(f"--run-dir: {run_dir}: no such directory")
    known = log_files(run_dir)
    if process is None:
        typer.echo("\n".join(known))
        return
    if process not in known:
        there = ", ".join(known) or "none, because `paceline up` has started no process in it"
        raise BadInput(f"no process {process[:64]!r} wrote a log in {run_dir}. There are: {there}")

    def runs() -> bool:
        """A fleet may be taken over by another launcher. Without a record its processes were
        started by hand, and nothing tells when they are done."""
        record = FleetRecord.read(run_dir)
        return record is None or record.supervisor.alive() or bool(record.survivors())

    def end_with_fleet() -> None:
        while tail.poll() is None and runs():
            time.sleep(0.5)
        time.sleep(0.5)  # for what was written last
        tail.terminate()

    follow = follow and runs()
    command = ["tail", f"--lines={lines}", *["-F", "--sleep-interval=0.2"] * follow]
    safe = sys.stdout.isatty()
    with subprocess.Popen([*command, known[process]], stdout=subprocess.PIPE) as tail:
        assert tail.stdout is not None
        if follow:
            Thread(target=end_with_fleet, daemon=True).start()
        try:
            for line in tail.stdout:
                text = line.decode(errors="replace").rstrip("\r\n")
                typer.echo(printable(text) if safe else text)
        finally:
            tail.terminate()  # the reader may have gone
