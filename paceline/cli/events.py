"""``paceline events``."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.common import JsonOption, Target, print_json_line, takes_target
from paceline.console.terminal import printable
from paceline.errors import BadInput

if TYPE_CHECKING:
    from paceline.rpc.client import ControlPlane

OVER_S = 1.5
"""Time for a controller to answer if the run directory says that the run has ended."""
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
    as_json: JsonOption = False,
) -> None:
    """Print the events of a run, the oldest first.

    Without --follow and --all the run directory is enough, even after the run has ended.

    Example: paceline events --run-dir runs/demo --follow
    """
    if not re.fullmatch(POSITION, after):
        raise BadInput(f"--after: {after} is no journal position, such as 1763711975123-0")
    if target.run_dir is not None and not (follow or all_kinds):
        _from_file(target.run_dir, after, as_json)
        return
    from paceline.rpc.client import ControlPlaneUnavailable
    from paceline.run_view.event_follower import answers, follow_events
    from paceline.run_view.words import is_listed
    from paceline.v1 import admin_pb2

    async def watch(control: ControlPlane) -> None:
        async for position, event in records(control):
            if all_kinds or is_listed(event):
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
            f"the run in {target.run_dir} is not running: {last}. Its files have the events without --all"
        )
    else:
        # The run is over: its files hold all of its listed events.
        assert target.run_dir is not None
        _from_file(target.run_dir, after, as_json)


def _from_file(run_dir: Path, after: str, as_json: bool) -> None:
    from paceline.run_view.json_lines import read_lines
    from paceline.run_view.run_file_writer import position_key

    path = run_dir / "events.jsonl"
    if not path.is_file():
        raise BadInput(f"--run-dir: {run_dir} has no events.jsonl: not a run directory")
    for event in read_lines(path):
        if not after or position_key(event["position"]) > position_key(after):
            _print(event, as_json)


def _print(event: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        print_json_line(event)
        return
    from paceline.run_view.words import text_of

    t = event.get("at") or event.get("t")
    typer.echo(f"{_clock(t) if t else '--:--:--'}  {printable(text_of(event))}")


def _clock(t: float) -> str:
    """The time of day, with the date unless it is today: runs take days."""
    at = time.localtime(t)
    today = time.strftime("%Y-%m-%d", at) == time.strftime("%Y-%m-%d")
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S", at)
