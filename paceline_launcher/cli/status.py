"""``paceline status | top | why | stacks``: the state of a run, what it waits for, and where a
process stands."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import BadInput, Unreachable
from paceline.process.kernel_state import kernel_state
from paceline.process.stacks import read_stacks
from paceline.rpc.grpc_channel import as_dict
from paceline_launcher.cli.common import (
    JsonOption,
    RunDirOption,
    Target,
    given_or_default,
    print_json,
)
from paceline_launcher.terminal import out_console, printable

if TYPE_CHECKING:
    from paceline.rpc.client import ControlPlane
    from paceline.v1 import admin_pb2

ANSWER_LIMIT_S = 3.0
LOOK_BACK_S = 60.0  # The view begins with the events of so long ago


def status(*, target: Target, as_json: JsonOption = False) -> None:
    """Show the state of a run: every process, the leader and its term, step and queue.

    Example: paceline status --run-dir runs/demo --json
    """
    reply = status_of(target)
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
    if reply.workers or reply.controllers:
        console.print(fleet_table(reply))
    if alone:
        console.print(f"warning: {alone}", markup=False, highlight=False, style="yellow")
    for one in reply.controllers:
        if one.rest and one.state != "silent":
            link = dashboard_link(one.rest, token if console.is_terminal else None)
            line = f"dashboard ({one.controller_id}): {link}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def status_of(target: Target) -> admin_pb2.StatusReply:
    """The leader's answer, or that of the files of a run that is over. Raises Unreachable."""
    from paceline.observe.run_watcher import leader_status
    from paceline.observe.runs import status_of_past

    try:
        return target.ask(lambda control: leader_status(control, ANSWER_LIMIT_S))
    except Unreachable:
        if target.run_dir is None or not target.told_of_end():
            raise
        return status_of_past(target.run_dir)


def top(*, target: Target, every: Annotated[float, typer.Option(min=0.1)] = 1.0) -> None:
    """Watch a running fleet: rewards, rate, time left, every process, the last events.

    A terminal is redrawn; otherwise lines are printed. The view survives a change of the leader and
    ends with the run. Exit status 1 if the run failed. Scripts read `paceline status --json`.

    Example: paceline top --run-dir runs/demo

    Args:
        every SECONDS: Refresh interval.
    """
    from paceline.observe.event_history import ENDS, is_listed, text_of
    from paceline.observe.run_watcher import GONE_S, follow_events, leader_status
    from paceline.observe.runs import read_run
    from paceline.observe.vocabulary import AT_EVERY_STEP
    from paceline.rpc.client import ControlPlaneUnavailable, RequestRefused
    from paceline_launcher.live_view import Console

    run_dir = target.run_dir

    async def look_on(control: ControlPlane) -> str:
        console, answered = Console(), -math.inf

        async def tell() -> None:
            # A journal position is the time in milliseconds.
            after = f"{round((time.time() - LOOK_BACK_S) * 1e3)}-0"
            with contextlib.suppress(ControlPlaneUnavailable, RequestRefused):  # the poll says so
                async for event in follow_events(control, after):
                    if is_listed(event) and event["type"] not in AT_EVERY_STEP:
                        console.note(text_of(event), event["at"])

        telling = asyncio.create_task(tell())
        try:
            while True:
                try:
                    status = await leader_status(control, ANSWER_LIMIT_S)
                except ControlPlaneUnavailable:
                    if run_dir is not None and target.over:
                        return read_run(run_dir).state
                    if time.monotonic() - answered > GONE_S:
                        raise
                else:
                    answered = time.monotonic()
                    console.show(status)
                    if status.phase in ENDS.values():
                        return status.phase
                await asyncio.sleep(every)
        finally:
            telling.cancel()
            console.close()

    raise typer.Exit(1 if target.ask(look_on) == "failed" else 0)


def why(*, target: Target, as_json: JsonOption = False) -> None:
    """Say what the run waits for: since when, whose fault it is, what happens next, what to do.

    Every controller is asked. The leader's answer counts; without a leader, each that answers is
    shown. A run that has ended is answered for by its files. Exit status 0 if nothing is late, 1 if
    something is slow or stuck or the run has failed, 3 if no controller answers.

    Example: paceline why --run-dir runs/demo
    """
    text, found, status = explain(target)
    if as_json:
        print_json(found)
    else:
        typer.echo(text)
    raise typer.Exit(status)


def explain(target: Target) -> tuple[str, dict[str, Any], int]:
    """Tells what the run waits for, or by its files how it ended: as text, as JSON and as an exit
    status. Raises Unreachable if nobody can say."""
    from paceline.observe.runs import is_run, read_run, still_done

    run_dir = target.run_dir
    try:
        answers, silent = target.ask(_ask_all)
        if not answers:
            raise Unreachable(_nobody(run_dir, silent))
    except (BadInput, Unreachable):
        run = read_run(run_dir) if run_dir is not None and is_run(run_dir) else None
        if run is None or run.state == "running":
            raise
        words = {"interrupted": "was interrupted", "ended": "has ended"}
        sentence = f"the run {words.get(run.state, f'has {run.state}')} after step {run.steps}"
        sentence += f": {run.reason}" if run.reason else ""
        sentence += still_done(run.path)
        failed = run.state == "failed"
        answer = {"sentence": sentence, "severity": "stuck" if failed else "ok"}
        again = "\n  continue it: the command that started it" if run.state in words else ""
        return printable(sentence + again), {"answers": [answer], "silent": {}}, 1 if failed else 0
    leading = [reply for reply in answers if reply.leads]
    shown = leading[:1] or answers
    lines = []
    for reply in shown:
        name = "" if leading else f"{reply.controller_id}: "
        lines.append(f"{name}{reply.sentence}")
        if reply.remedy:
            lines.append(f"  remedy: {reply.remedy}")
        if reply.faults:
            lines.append(f"faults: {reply.faults}")
    for address, how in silent.items() if not leading else ():
        lines.append(f"the controller at {address} does not answer ({how})")
    well = all(reply.severity == "ok" for reply in shown)
    found = {"answers": [as_dict(reply) for reply in shown], "silent": silent}
    return printable("\n".join(lines)), found, 0 if well else 1


async def _ask_all(control: ControlPlane) -> tuple[list[admin_pb2.WhyReply], dict[str, str]]:
    """Answers, and the addresses that did not answer with the reason."""
    import grpc.aio

    from paceline.rpc.client import RequestRefused
    from paceline.v1 import admin_pb2

    silent: dict[str, str] = {}
    replies: list[admin_pb2.WhyReply] = []

    async def ask(address: str) -> None:
        call, request = control.bind(address, "AdminService.Why"), admin_pb2.WhyRequest()
        try:
            reply = await call(request, timeout=ANSWER_LIMIT_S, metadata=control.metadata)
            replies.append(reply)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                raise RequestRefused(error.code().name, error.details() or "") from None
            silent[address] = error.code().name.lower().replace("_", " ")

    await asyncio.gather(*map(ask, control.addresses))
    return replies, silent


def _nobody(run_dir: Path | None, silent: dict[str, str]) -> str:
    """No controller answers: what this machine knows of their processes."""
    from paceline.observe.fleet_file import FleetRecord

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


def stacks(process: str, *, run_dir: RunDirOption = None) -> None:
    """Print the Python stacks of a worker or controller, also of one that hangs.

    Works on the machine of the process, which is asked by a signal and writes them to its log
    whatever it is stuck in. A stopped process (SIGSTOP) cannot answer: the kernel's view of it is
    shown.

    Example: paceline stacks policy-1 --run-dir runs/demo

    Args:
        process PROCESS: For example policy-1.
    """
    from paceline.observe.fleet_file import FleetRecord

    run_dir, host = given_or_default(run_dir), socket.gethostname()
    records = map(FleetRecord.read, (run_dir, *run_dir.glob("nodes/node-*")))
    known = [one for record in records if record is not None for one in record.processes]
    for one in known:
        if one.name != process or not one.ids or not one.ids[-1].alive():
            continue
        typer.echo(f"{process} (host {host}, pid {one.ids[-1].pid})")
        text, note = read_stacks(one.ids[-1].pid, Path(one.log))
        typer.echo(printable(text or note))
        raise typer.Exit(0 if text else 1)
    raise BadInput(
        f"{run_dir} names no process {process!r} that runs on {host}: run this on its machine, "
        "which paceline status names, with the run's directory there. One that `paceline up` has "
        "not started writes its stacks to its standard error: kill -USR2 PID"
    )
