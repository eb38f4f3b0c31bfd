"""``paceline top``: the live view of ``paceline up`` for a fleet that runs elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.common import JsonOption, Target, print_json_line, takes_target
from paceline.console.terminal import out_console

if TYPE_CHECKING:
    from paceline.console.live_view import Console
    from paceline.rpc.client import ControlPlane
    from paceline.run_view.run_watcher import RunPicture, Shown

HISTORY = 48


@takes_target
def top(
    target: Target,
    every: Annotated[
        float, typer.Option("--every", metavar="SECONDS", min=0.1, help="Refresh interval.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the state once and end.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Watch a running fleet: rewards, pace, time left, every process, the last events.

    A terminal is redrawn; otherwise lines are printed, or with --json one object per refresh. The view
    survives a change of the leader and ends with the run. Exit status 1 if the run failed.

    Example: paceline top --run-dir runs/demo
    """
    from paceline.run_view.run_watcher import first_look, watch

    async def look_on(control: ControlPlane) -> str:
        picture = await first_look(control, target.run_dir, target.rest)
        if once:
            _print_once(picture, as_json)
            return ""
        shown: Shown = _Objects() if as_json else _Console()
        return await watch(control, picture, shown, every_s=every, run_dir=target.run_dir)

    raise typer.Exit(1 if target.ask(look_on) == "failed" else 0)


def as_object(picture: RunPicture) -> dict[str, Any]:
    """The status' own fields and: t (Unix seconds), reward_history (the run in at most 48 spans),
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


class _Objects:
    """One JSON object per refresh."""

    def begin(self, picture: RunPicture) -> None:
        pass

    def look(self, picture: RunPicture) -> None:
        print_json_line(as_object(picture))

    def event(self, t: float, text: str) -> None:
        pass

    def silent(self, seconds: float) -> None:
        print_json_line({"t": round(time.time(), 3), "answered": False, "silent_s": seconds})

    def close(self) -> None:
        pass


class _Console:
    """The live table, or lines if there is no terminal."""

    def __init__(self) -> None:
        self._console: Console | None = None
        self._silent = False

    def begin(self, picture: RunPicture) -> None:
        from paceline.console.live_view import open_console

        self._console = open_console(progress=picture.progress)
        for t, text in picture.events:
            self._console.note(text, t)

    def look(self, picture: RunPicture) -> None:
        assert self._console is not None
        assert picture.status is not None
        if self._silent:
            self._silent = False
            self._console.note("a controller answers again", time.time())
        self._console.show(picture.status)

    def event(self, t: float, text: str) -> None:
        assert self._console is not None
        self._console.note(text, t)

    def silent(self, seconds: float) -> None:
        assert self._console is not None
        if not self._silent:
            self._silent = True
            self._console.note("no controller answers; trying again", time.time())

    def close(self) -> None:
        if self._console is not None:
            self._console.close()


def register(app: typer.Typer) -> None:
    app.command()(top)
