"""``paceline why | stacks``: what a run waits for, and where a process stands."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import BadInput, Unreachable
from paceline.process.stacks import Stacks, read_stacks
from paceline.rpc.messages import as_dict
from paceline_launcher.cli.common import JsonOption, Target, print_json, takes_target
from paceline_launcher.console.terminal import printable

if TYPE_CHECKING:
    from paceline.rpc.client import ControlPlane
    from paceline.v1 import admin_pb2

ANSWER_S = 3.0
SHOWN = 8
"""Names in a refusal."""


@takes_target
def why(target: Target, as_json: JsonOption = False) -> None:
    """Say what the run waits for: since when, whose fault it is, what happens next, what to do.

    Every controller is asked. The leader's answer counts; without a leader, each that answers is
    shown. Exit status 0 if nothing is late, 1 if something is slow or stuck, 3 if no controller
    answers.

    Example: paceline why --run-dir runs/demo
    """
    answers, silent = target.ask(_ask_all)
    leading = [reply for reply in answers if reply.leads]
    shown = leading[:1] or answers
    if not shown:
        raise Unreachable(_nobody(target.run_dir, silent))
    if as_json:
        print_json({"answers": [as_dict(reply) for reply in shown], "silent": silent})
    else:
        for reply in shown:
            _print(reply, with_name=not leading)
        for address, how in silent.items() if not leading else ():
            typer.echo(f"the controller at {address} does not answer ({how})")
    raise typer.Exit(0 if all(reply.severity == "ok" for reply in shown) else 1)


@takes_target
def stacks(
    target: Target,
    process: Annotated[str, typer.Argument(metavar="PROCESS", help="For example policy-1.")],
    as_json: JsonOption = False,
) -> None:
    """Print the Python stacks of a worker or controller, also of one that hangs.

    Works on the machine of the process, which is asked by a signal and writes them itself whatever
    it is stuck in. A stopped process (SIGSTOP) cannot answer: the kernel's view of it is shown.

    Example: paceline stacks policy-1 --run-dir runs/demo
    """
    found = _local(target.run_dir, process)
    if found is None:
        found = target.ask(lambda control: _elsewhere(control, target.run_dir, process))
    if as_json:
        print_json(found)
    else:
        typer.echo(f"{process} (host {found['host']}, pid {found['pid']})")
        typer.echo(printable(found["stacks"] or found["note"]))
    raise typer.Exit(0 if found["stacks"] else 1)


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
    lines = [f"no controller answers ({', '.join(f'{a}: {how}' for a, how in silent.items())})"]
    for name, pid, words in _processes(run_dir):
        lines.append(f"{name} (pid {pid}) is {words}")
    if len(lines) == 1:
        lines.append("Is the run on another machine, or has it ended? See paceline status")
    return "\n".join(lines)


def _processes(run_dir: Path | None) -> list[tuple[str, int, str]]:
    """Controllers that the launcher started here: name, pid, and what the kernel says."""
    from paceline.observe.fleet_file import FleetRecord
    from paceline.process.kernel_state import kernel_state

    record = FleetRecord.read(run_dir) if run_dir is not None else None
    found = []
    for process in record.processes if record is not None else ():
        if process.role == "controller" and process.ids:
            pid = process.ids[-1].pid
            state = kernel_state(pid) if process.ids[-1].alive() else None
            words = "not running" if state is None else state.words
            remedy = f"; continue it with: kill -CONT {pid}" if state and state.stopped else ""
            found.append((process.name, pid, words + remedy))
    return found


def _local(run_dir: Path | None, name: str) -> dict[str, Any] | None:
    """Stacks of a process that a supervisor of this machine started; None: it knows none."""
    from paceline.observe.fleet_file import FleetRecord

    record = FleetRecord.read(run_dir) if run_dir is not None else None
    if record is None or run_dir is None:
        return None
    for process in record.processes:
        if process.name == name and process.ids and process.ids[-1].alive():
            pid = process.ids[-1].pid
            return _as_dict(socket.gethostname(), pid, read_stacks(run_dir, name, pid))
    return None


def _as_dict(host: str, pid: int, found: Stacks) -> dict[str, Any]:
    return {"host": host, "pid": pid, "stacks": found.text, "note": found.note}


async def _elsewhere(control: ControlPlane, run_dir: Path | None, name: str) -> dict[str, Any]:
    """Stacks of a worker that no supervisor of this machine started, if it runs on this machine."""
    from paceline.v1 import admin_pb2

    status = await control.call("AdminService.GetStatus", admin_pb2.StatusRequest(), ANSWER_S)
    worker = next((w for w in status.workers if w.worker_id == name), None)
    if worker is None:
        known = ", ".join(sorted(w.worker_id for w in status.workers)[:SHOWN]) or "none"
        raise BadInput(f"there is no worker {name!r}; registered workers: {known}")
    found = Stacks(
        note=f"it runs on {worker.host}: run paceline stacks with the run's directory there. A "
        "worker whose event loop is blocked writes its stacks to its log by itself"
    )
    if run_dir is not None and worker.host == socket.gethostname():
        found = await asyncio.to_thread(read_stacks, run_dir, name, worker.pid)
    return _as_dict(worker.host, worker.pid, found)
