"""``paceline why | stacks``: what a run waits for, and where a process stands."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    takes_target,
)
from paceline_launcher.console.terminal import printable

if TYPE_CHECKING:
    from paceline.rpc.client import ControlPlane
    from paceline.v1 import admin_pb2

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
