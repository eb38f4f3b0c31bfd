"""``paceline scale | drain | pause | resume | stop``: requests to the leader, each idempotent."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.common import (
    ControllersOption,
    JsonOption,
    RunDirOption,
    TlsOption,
    TokenOption,
    is_number,
    last_known,
    print_json,
    with_control,
)
from paceline.errors import BadInput

if TYPE_CHECKING:
    from paceline.rpc.client import ControlPlane

ANSWER_LIMIT_S = 20.0
LOOK_S = 0.5
ROLES = ("policy", "rollout")
MOST = 10_000
"""The controllers take no more."""


def scale(
    counts: Annotated[
        list[str], typer.Argument(metavar="ROLE=COUNT...", help="policy=2, rollout=4, or both.")
    ],
    expected: Annotated[
        list[str] | None,
        typer.Option(
            "--expected",
            metavar="ROLE=COUNT",
            help="Refuse where another number is wanted by now; may be repeated.",
            show_default=False,
        ),
    ] = None,
    run_dir: RunDirOption = None,
    controllers: ControllersOption = None,
    as_json: JsonOption = False,
    token_file: TokenOption = None,
    tls_ca: TlsOption = None,
) -> None:
    """Change the number of workers while the run goes on.

    With --expected, for scripts that look first: it changes nothing where someone else, or the
    autoscaler, has changed the number in the meantime.

    Example: paceline scale policy=3 rollout=4 --run-dir runs/demo
    """
    fields = {"desired": _counts(counts), "expected": _counts(expected or [], "--expected: ")}
    _ask("Scale", fields, as_json, run_dir, controllers, token_file, tls_ca)


def _counts(items: list[str], where: str = "") -> dict[str, int]:
    found: dict[str, int] = {}
    for item in items:
        role, equals, count = item.partition("=")
        if role not in ROLES or not equals or not is_number(count, 1, MOST):
            raise BadInput(
                f"{where}{item}: write policy=COUNT or rollout=COUNT, COUNT from 1 to {MOST:,}"
            )
        if found.get(role, int(count)) != int(count):
            raise BadInput(f"{where}{item}: {role}={found[role]} was given too")
        found[role] = int(count)
    return found


def drain(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Its id, see paceline status.")],
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Keep the wanted number: another takes its place."),
    ] = False,
    wait: Annotated[
        float,
        typer.Option("--wait", min=0.0, help="Return only once it has left; at most SECONDS."),
    ] = 0.0,
    incarnation: Annotated[
        str,
        typer.Option(
            "--incarnation",
            metavar="NUMBER",
            help="Refuse where another process has that name by now; see paceline status --json.",
        ),
    ] = "",
    run_dir: RunDirOption = None,
    controllers: ControllersOption = None,
    as_json: JsonOption = False,
    token_file: TokenOption = None,
    tls_ca: TlsOption = None,
) -> None:
    """Let one worker finish what it holds and leave for good.

    The wanted number goes down by one with it, unless --replace is given.

    Example: paceline drain rollout-1 --run-dir runs/demo
    """
    if incarnation and not is_number(incarnation, 1, (1 << 64) - 1):
        raise BadInput(
            f"--incarnation: {incarnation[:32]} is none: paceline status --json shows it"
        )
    meant = int(incarnation or 0)
    target = (run_dir, controllers, token_file, tls_ca)
    fields = {"worker_id": worker, "replace": replace, "incarnation": meant}
    _ask("Drain", fields, as_json, *target)
    if wait and not with_control(*target, lambda control: _left(control, worker, wait, meant)):
        typer.echo(f"error: {worker} is still there after {wait:g} s", err=True)
        raise typer.Exit(1)


async def _left(
    control: ControlPlane, worker_id: str, limit_s: float, incarnation: int = 0
) -> bool:
    """Whether the process that has this name (0: now) is gone within ``limit_s`` seconds."""
    from paceline.v1 import admin_pb2

    deadline = time.monotonic() + limit_s
    while True:
        status = await control.call(
            "AdminService.GetStatus", admin_pb2.StatusRequest(), timeout_s=ANSWER_LIMIT_S
        )
        here = next((w for w in status.workers if w.worker_id == worker_id), None)
        if here is None or here.state in ("stopped", "dead"):
            return True
        incarnation = incarnation or here.incarnation
        if here.incarnation != incarnation or status.phase in ("finished", "failed"):
            return True
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(LOOK_S)


def pause(
    run_dir: RunDirOption = None,
    controllers: ControllersOption = None,
    as_json: JsonOption = False,
    token_file: TokenOption = None,
    tls_ca: TlsOption = None,
) -> None:
    """Start no new steps and lease no new tasks until `paceline resume`.

    Example: paceline pause --run-dir runs/demo
    """
    _ask("Pause", {"paused": True}, as_json, run_dir, controllers, token_file, tls_ca)


def resume(
    run_dir: RunDirOption = None,
    controllers: ControllersOption = None,
    as_json: JsonOption = False,
    token_file: TokenOption = None,
    tls_ca: TlsOption = None,
) -> None:
    """Go on with a paused run.

    Example: paceline resume --run-dir runs/demo
    """
    _ask("Pause", {"paused": False}, as_json, run_dir, controllers, token_file, tls_ca)


def stop(
    reason: Annotated[str, typer.Option("--reason", help="Kept in the run's events.")] = "asked to",
    run_dir: RunDirOption = None,
    controllers: ControllersOption = None,
    as_json: JsonOption = False,
    token_file: TokenOption = None,
    tls_ca: TlsOption = None,
) -> None:
    """End a run early and for good: after the open step, with a final checkpoint.

    To interrupt a run that is to go on later, end `paceline up` with Ctrl-C instead.

    Example: paceline stop --run-dir runs/demo --reason "good enough"
    """
    _ask("Stop", {"reason": reason}, as_json, run_dir, controllers, token_file, tls_ca)


def _ask(method: str, fields: dict[str, Any], as_json: bool, *target: Any) -> None:
    from paceline.v1 import admin_pb2

    # One id for all tries of this command: a retry over a failover has one effect.
    request = getattr(admin_pb2, f"{method}Request")(request_id=uuid.uuid4().hex, **fields)

    async def ask(control: ControlPlane) -> admin_pb2.AdminReply:
        reply: admin_pb2.AdminReply = await control.call(
            f"AdminService.{method}", request, timeout_s=ANSWER_LIMIT_S
        )
        return reply

    from paceline.rpc.client import ControlPlaneUnavailable

    run_dir, controllers, token_file, tls_ca = target
    try:
        reply = with_control(run_dir, controllers, token_file, tls_ca, ask)
    except ControlPlaneUnavailable as error:
        if run_dir is not None and (last := last_known(run_dir)):
            raise ControlPlaneUnavailable(f"the run in {run_dir} is not running: {last}") from error
        raise
    if as_json:
        print_json({"accepted": reply.accepted, "message": reply.message})
    if not reply.accepted:
        typer.echo(f"error: refused: {reply.message}", err=True)
        raise typer.Exit(1)
    if not as_json:
        typer.echo(reply.message or "done")


def register(app: typer.Typer) -> None:
    for command in (scale, drain, pause, resume, stop):
        app.command()(command)
