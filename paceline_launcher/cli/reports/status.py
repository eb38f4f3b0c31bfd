"""``paceline status | top | why | stacks``: the state of a run, what it waits for, and where a
process stands."""

from __future__ import annotations

import asyncio
import socket
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import BadInput, Unreachable
from paceline.process.stacks import process_of, read_stacks
from paceline.rpc.messages import as_dict
from paceline_launcher.cli.common import (
    JsonOption,
    RunDirOption,
    Target,
    given_or_default,
    print_json,
    print_json_line,
    takes_target,
)
from paceline_launcher.terminal import out_console, printable

if TYPE_CHECKING:
    from paceline.observe.run_watcher import RunPicture
    from paceline.rpc.client import ControlPlane
    from paceline.v1 import admin_pb2
    from paceline_launcher.live_view import Console

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
    from paceline_launcher.live_view import fleet_table, headline, progress_table

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
    from paceline_launcher.live_view import open_console

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
    from paceline_launcher.live_view import picture as draw

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


ANSWER_S = 3.0


@takes_target
def why(target: Target, as_json: JsonOption = False) -> None:
    """Say what the run waits for: since when, whose fault it is, what happens next, what to do.

    Every controller is asked. The leader's answer counts; without a leader, each that answers is
    shown. A run that has ended is answered for by its files. Exit status 0 if nothing is late, 1 if
    something is slow or stuck or the run has failed, 3 if no controller answers.

    Example: paceline why --run-dir runs/demo
    """
    from paceline.rpc.client import ControlPlaneUnavailable

    try:
        answers, silent = target.ask(_ask_all)
    except (BadInput, ControlPlaneUnavailable):
        _tell_end(target.run_dir, as_json=as_json)
        raise
    leading = [reply for reply in answers if reply.leads]
    shown = leading[:1] or answers
    if not shown:
        _tell_end(target.run_dir, as_json=as_json)
        raise Unreachable(_nobody(target.run_dir, silent))
    if as_json:
        print_json({"answers": [as_dict(reply) for reply in shown], "silent": silent})
    else:
        for reply in shown:
            _print(reply, with_name=not leading)
        for address, how in silent.items() if not leading else ():
            typer.echo(f"the controller at {address} does not answer ({how})")
    raise typer.Exit(0 if all(reply.severity == "ok" for reply in shown) else 1)


def stacks(
    process: Annotated[str, typer.Argument(metavar="PROCESS", help="For example policy-1.")],
    run_dir: RunDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the Python stacks of a worker or controller, also of one that hangs.

    Works on the machine of the process, which is asked by a signal and writes them itself whatever
    it is stuck in. A stopped process (SIGSTOP) cannot answer: the kernel's view of it is shown.

    Example: paceline stacks policy-1 --run-dir runs/demo
    """
    run_dir, host = given_or_default(run_dir), socket.gethostname()
    pid = process_of(run_dir, process)
    if pid is None:
        raise BadInput(
            f"no process {process!r} of {run_dir} runs on {host}: run this on its machine, which "
            "paceline status names, with the run's directory there"
        )
    found = read_stacks(run_dir, process, pid)
    if as_json:
        print_json({"host": host, "pid": pid, "stacks": found.text, "note": found.note})
    else:
        typer.echo(f"{process} (host {host}, pid {pid})")
        typer.echo(printable(found.text or found.note))
    raise typer.Exit(0 if found.text else 1)


def _tell_end(run_dir: Path | None, *, as_json: bool) -> None:
    """Tells how the run ended, by its files, and exits; returns if it has not."""
    from paceline.observe.runs import is_run, read_run

    if run_dir is None or not is_run(run_dir):
        return
    run = read_run(run_dir)
    if run.state == "running":
        return
    words = {"interrupted": "was interrupted", "ended": "has ended"}.get(
        run.state, f"has {run.state}"
    )
    sentence = f"the run {words} after step {run.steps}" + (f": {run.reason}" if run.reason else "")
    failed = run.state == "failed"
    if as_json:
        severity = "stuck" if failed else "ok"
        print_json({"answers": [{"sentence": sentence, "severity": severity}], "silent": {}})
    else:
        typer.echo(printable(sentence))
        typer.echo(f"  look at it: paceline open {run_dir}")
    raise typer.Exit(1 if failed else 0)


async def _ask_all(control: ControlPlane) -> tuple[list[admin_pb2.WhyReply], dict[str, str]]:
    """Answers, and the addresses that did not answer with the reason."""
    import grpc.aio

    from paceline.rpc.client import RequestRefused
    from paceline.v1 import admin_pb2

    silent: dict[str, str] = {}

    async def ask(address: str) -> admin_pb2.WhyReply | None:
        call = control.bind(address, "AdminService.Why")
        try:
            reply: admin_pb2.WhyReply = await call(
                admin_pb2.WhyRequest(), timeout=ANSWER_S, metadata=control.metadata
            )
            return reply
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise RequestRefused(error.code().name, error.details() or "") from None
            silent[address] = error.code().name.lower().replace("_", " ")
            return None

    replies = await asyncio.gather(*(ask(address) for address in control.addresses))
    return [reply for reply in replies if reply is not None], silent


def _print(reply: admin_pb2.WhyReply, *, with_name: bool) -> None:
    said = f"{reply.controller_id}: {reply.sentence}" if with_name else reply.sentence
    typer.echo(printable(said))
    if reply.remedy:
        typer.echo(printable(f"  remedy: {reply.remedy}"))
    if reply.faults:
        typer.echo(printable(f"faults: {reply.faults}"))


def _nobody(run_dir: Path | None, silent: dict[str, str]) -> str:
    """No controller answers: what this machine knows of their processes."""
    from paceline.observe.fleet_file import FleetRecord
    from paceline.process.kernel_state import kernel_state

    lines = [f"no controller answers ({', '.join(f'{a}: {how}' for a, how in silent.items())})"]
    record = FleetRecord.read(run_dir) if run_dir is not None else None
    for process in record.processes if record is not None else ():
        if process.role == "controller" and process.ids:
            pid = process.ids[-1].pid
            state = kernel_state(pid) if process.ids[-1].alive() else None
            remedy = f"; continue it with: kill -CONT {pid}" if state and state.stopped else ""
            words = "not running" if state is None else state.words
            lines.append(f"{process.name} (pid {pid}) is {words}{remedy}")
    if len(lines) == 1:
        lines.append("Is the run on another machine, or has it ended? See paceline status")
    return "\n".join(lines)
