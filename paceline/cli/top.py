"""``paceline top``: live view of any running fleet."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.common import (
    BadInput,
    ControllersOption,
    JsonOption,
    RunDirOption,
    TlsOption,
    TokenOption,
    find_target,
    last_known,
    print_json_line,
)
from paceline.console.terminal import out_console

if TYPE_CHECKING:
    from paceline.console.live_view import Console
    from paceline.run_view.run_watcher import RunPicture

HISTORY = 48


def top(
    every: Annotated[
        float, typer.Option("--every", metavar="SECONDS", min=0.1, help="Interval between polls.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show the state once and exit.")] = False,
    run_dir: RunDirOption = None,
    controllers: ControllersOption = None,
    as_json: JsonOption = False,
    token_file: TokenOption = None,
    tls_ca: TlsOption = None,
) -> None:
    """Watch a running fleet: rewards, rate, time left, every process, the last events.

    Redraws on a terminal and prints lines otherwise; with --json it prints one object per poll. It
    follows a change of leader and ends with the run. The exit status is 1 if the run failed.

    Example: paceline top --run-dir runs/demo
    """
    from paceline.console.live_view import open_console
    from paceline.rpc.client import ControlPlaneUnavailable
    from paceline.run_view.run_watcher import first_look, watch

    async def session() -> str:
        target = find_target(run_dir, controllers, token_file, tls_ca)
        control = target.control()
        try:
            picture = await first_look(control, run_dir, target.rest)
            if once:
                _print_once(picture, as_json)
                return ""
            if as_json:
                show, note = _print_object, _ignore
                return await watch(control, picture, show, note, every_s=every, run_dir=run_dir)
            console = open_console(progress=picture.progress)
            try:
                for t, text in picture.events:
                    console.note(text, t)
                show = partial(_show_status, console)
                return await watch(
                    control, picture, show, console.note, every_s=every, run_dir=run_dir
                )
            finally:
                console.close()
        finally:
            await control.close()

    try:
        end = asyncio.run(session())
    except (ControlPlaneUnavailable, BadInput) as error:
        if run_dir is not None and (last := last_known(run_dir)):
            raise ControlPlaneUnavailable(f"the run in {run_dir} is not running: {last}") from error
        raise
    raise typer.Exit(1 if end == "failed" else 0)


def as_object(picture: RunPicture) -> dict[str, Any]:
    """Fields of the status and: t (Unix seconds), reward_history (the run in at most 48 spans),
    time_left_s (null: unknown), last_event ({t, text} or null)."""
    from paceline.cli.messages import as_dict

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
    from paceline.console.live_view import picture as draw

    out_console(150).print(draw(picture.status, picture.progress, picture.events))


def _print_object(picture: RunPicture) -> None:
    if picture.silent_s:
        t = round(time.time(), 3)
        print_json_line({"t": t, "answered": False, "silent_s": picture.silent_s})
    else:
        print_json_line(as_object(picture))


def _ignore(text: str, t: float) -> None:
    """An object shows the last event."""


def _show_status(console: Console, picture: RunPicture) -> None:
    if picture.status is not None and not picture.silent_s:
        console.show(picture.status)


def register(app: typer.Typer) -> None:
    app.command()(top)
