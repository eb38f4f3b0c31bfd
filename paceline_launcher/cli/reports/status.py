"""``paceline status | top``: the state of a run, once or live."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.rpc.messages import as_dict
from paceline_launcher.cli.common import (
    JsonOption,
    Target,
    print_json,
    print_json_line,
    takes_target,
)
from paceline_launcher.console.terminal import out_console

if TYPE_CHECKING:
    from paceline.observe.run_watcher import RunPicture
    from paceline.rpc.client import ControlPlane
    from paceline_launcher.console.live_view import Console

ANSWER_LIMIT_S = 3.0
HISTORY = 48


@takes_target
def status(target: Target, as_json: JsonOption = False) -> None:
    """Show the state of a run: every process, the leader and its term, step and queue.

    Example: paceline status --run-dir runs/demo --json
    """
    from paceline.observe.event_follower import leader_status

    reply = target.ask(lambda control: leader_status(control, ANSWER_LIMIT_S))
    from paceline.observe.fleet_file import supervisor_gone
    from paceline.rpc.auth import dashboard_link, read_token

    alone = supervisor_gone(target.run_dir) if target.run_dir is not None else ""
    if as_json:
        print_json({**as_dict(reply), "supervisor_trouble": alone})
        return
    from paceline_launcher.console.status_tables import fleet_table, headline, progress_table

    console = out_console()
    token = read_token(target.auth(), target.run_dir)
    console.print(headline(reply), markup=False, highlight=False)
    console.print(progress_table(reply))
    console.print(fleet_table(reply))
    if alone:
        console.print(f"warning: {alone}", markup=False, highlight=False, style="yellow")
    for one in reply.controllers:
        if one.rest and one.state != "silent":
            link = dashboard_link(one.rest, token if console.is_terminal else None)
            line = f"dashboard ({one.controller_id}): {link}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)


@takes_target
def top(
    target: Target,
    every: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="Refresh interval.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the state once and exit.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Watch a running fleet: rewards, rate, time left, every process, the last events.

    A terminal is redrawn; otherwise lines are printed, or with --json one object per refresh. The
    view survives a change of the leader and ends with the run. Exit status 1 if the run failed.

    Example: paceline top --run-dir runs/demo
    """
    from paceline.observe.run_watcher import first_look, watch
    from paceline_launcher.console.live_view import open_console

    async def look_on(control: ControlPlane) -> str:
        run_dir = target.run_dir
        picture = await first_look(control, run_dir, target.rest)
        if once:
            _print_once(picture, as_json)
            return ""
        watched = partial(watch, control, picture, every_s=every, run_dir=run_dir)
        if as_json:
            # An object shows the last event.
            return await watched(_print_object, lambda text, t: None)
        console = open_console(progress=picture.progress)
        try:
            for t, text in picture.events:
                console.note(text, t)
            return await watched(partial(_show_status, console), console.note)
        finally:
            console.close()

    raise typer.Exit(1 if target.ask(look_on) == "failed" else 0)


def as_object(picture: RunPicture) -> dict[str, Any]:
    """Fields of the status and: t (Unix seconds), reward_history (the run in at most 48 spans),
    time_left_s (null: unknown), last_event ({t, text} or null)."""
    status = picture.status
    assert status is not None
    over = status.phase in ("finished", "failed")
    left = picture.progress.seconds_left(int(status.step), int(status.total_steps))
    last = picture.events[-1] if picture.events else None
    return {
        "t": round(time.time(), 3),
        "answered": True,
        **as_dict(status),
        "reward_history": picture.progress.rewards(HISTORY),
        "time_left_s": None if over else left,
        "last_event": {"t": last[0], "text": last[1]} if last else None,
    }


def _print_once(picture: RunPicture, as_json: bool) -> None:
    if as_json:
        print_json_line(as_object(picture))
        return
    from paceline_launcher.console.live_view import picture as draw

    out_console(150).print(draw(picture.status, picture.progress, picture.events))


def _print_object(picture: RunPicture) -> None:
    if picture.silent_s:
        t = round(time.time(), 3)
        print_json_line({"t": t, "answered": False, "silent_s": picture.silent_s})
    else:
        print_json_line(as_object(picture))


def _show_status(console: Console, picture: RunPicture) -> None:
    if picture.status is not None and not picture.silent_s:
        console.show(picture.status)
