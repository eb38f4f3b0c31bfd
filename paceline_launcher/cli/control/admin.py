"""``paceline scale | drain | pause | resume | stop``: idempotent requests to the leader."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import BadInput, UserError
from paceline.worker_pools import POLICY, ROLLOUT, SCORER, role_of, scorer_of
from paceline_launcher.cli.common import JsonOption, Target, is_number, print_json, takes_target

if TYPE_CHECKING:
    from paceline.rpc.client import ControlPlane

ANSWER_LIMIT_S = 20.0
POLL_S = 0.5
MOST = 10_000
"""Largest number that the controllers accept."""


@takes_target
def scale(
    target: Target,
    counts: Annotated[
        list[str],
        typer.Argument(metavar="ROLE=COUNT...", help="policy=2, rollout=4, scorer:NAME=2."),
    ],
    expected: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE=COUNT",
            help="Refuse if the desired number is not this one; may be repeated.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Change the desired number of workers of a running fleet.

    The answer says who starts or drains workers until their number is the desired one: `paceline
    up`, a provider (fleet.provider), or nobody, and then what to do.

    A script that has read the numbers first passes them as --expected: the command then changes
    nothing if another user, or the autoscaler, has changed them since.

    Example: paceline scale policy=3 rollout=4 --run-dir runs/demo
    """
    fields = {"desired": _counts(counts), "expected": _counts(expected or [], "--expected: ")}
    _ask("Scale", fields, as_json, target)


def _counts(items: list[str], option: str = "") -> dict[str, int]:
    found: dict[str, int] = {}
    for item in items:
        role, equals, count = item.partition("=")
        known = role in (POLICY, ROLLOUT) or (role_of(role) == SCORER and scorer_of(role))
        if not known or not equals or not is_number(count, 1, MOST):
            raise BadInput(
                f"{option}{item}: write policy=COUNT, rollout=COUNT or scorer:NAME=COUNT, "
                f"COUNT from 1 to {MOST:,}"
            )
        if found.get(role, int(count)) != int(count):
            raise BadInput(f"{option}{item}: {role}={found[role]} was given as well")
        found[role] = int(count)
    return found


@takes_target
def drain(
    target: Target,
    worker: Annotated[
        str, typer.Argument(metavar="WORKER", help="Id of the worker, see paceline status.")
    ],
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Keep the desired number: another worker takes its place."),
    ] = False,
    wait: Annotated[
        float,
        typer.Option(min=0.0, metavar="SECONDS", help="Wait for it to leave, at most this long."),
    ] = 0.0,
    incarnation: Annotated[
        str,
        typer.Option(
            metavar="NUMBER",
            help="Refuse if another process has this id now; see paceline status --json.",
        ),
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """Let one worker finish its tasks and leave.

    The desired number goes down by one, unless --replace is given.

    Example: paceline drain rollout-1 --run-dir runs/demo
    """
    if incarnation and not is_number(incarnation, 1, (1 << 64) - 1):
        raise BadInput(
            f"--incarnation: {incarnation[:32]} is not an incarnation: paceline status --json shows it"
        )
    meant = int(incarnation or 0)
    fields = {"worker_id": worker, "replace": replace, "incarnation": meant}
    _ask("Drain", fields, as_json, target)
    if wait and not target.ask(lambda control: _left(control, worker, wait, meant)):
        raise UserError(f"{worker} has not left within {wait:g} s")


async def _left(
    control: ControlPlane, worker_id: str, limit_s: float, incarnation: int = 0
) -> bool:
    """True if that process (0: the one that has the id now) leaves within ``limit_s`` seconds."""
    from paceline.observe.event_follower import leader_status

    deadline = time.monotonic() + limit_s
    while True:
        status = await leader_status(control, ANSWER_LIMIT_S)
        here = next((w for w in status.workers if w.worker_id == worker_id), None)
        if here is None or here.state in ("stopped", "dead"):
            return True
        incarnation = incarnation or here.incarnation
        if here.incarnation != incarnation or status.phase in ("finished", "failed"):
            return True
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(POLL_S)


@takes_target
def pause(target: Target, as_json: JsonOption = False) -> None:
    """Start no new step and lease no new task until `paceline resume`.

    Example: paceline pause --run-dir runs/demo
    """
    _ask("Pause", {"paused": True}, as_json, target)


@takes_target
def resume(target: Target, as_json: JsonOption = False) -> None:
    """Continue a paused run.

    Example: paceline resume --run-dir runs/demo
    """
    _ask("Pause", {"paused": False}, as_json, target)


@takes_target
def checkpoint(
    target: Target,
    wait: Annotated[
        float,
        typer.Option(
            min=0.0, metavar="SECONDS", help="Wait until it is written, at most this long."
        ),
    ] = 0.0,
    as_json: JsonOption = False,
) -> None:
    """Write a checkpoint beside the regular ones, after the next step.

    Example: paceline checkpoint --run-dir runs/demo --wait 300
    """
    before = target.ask(_checkpoint_step)
    _ask("SaveCheckpoint", {}, as_json, target)
    if wait and not target.ask(lambda control: _saved(control, before, wait)):
        raise UserError(f"no checkpoint after that of step {before} is written within {wait:g} s")


async def _checkpoint_step(control: ControlPlane) -> int:
    from paceline.observe.event_follower import leader_status

    return int((await leader_status(control, ANSWER_LIMIT_S)).checkpoint_step)


async def _saved(control: ControlPlane, before: int, limit_s: float) -> bool:
    deadline = time.monotonic() + limit_s
    while await _checkpoint_step(control) <= before:
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(POLL_S)
    return True


@takes_target
def stop(
    target: Target,
    reason: Annotated[str, typer.Option(help="Recorded in the run's events.")] = "paceline stop",
    as_json: JsonOption = False,
) -> None:
    """End a run for good, after the open step and with a final checkpoint.

    To continue the run later, interrupt `paceline up` with Ctrl-C instead.

    Example: paceline stop --run-dir runs/demo --reason "good enough"
    """
    _ask("Stop", {"reason": reason}, as_json, target)


def _ask(method: str, fields: dict[str, Any], as_json: bool, target: Target) -> None:
    from paceline.v1 import admin_pb2

    # One id for all tries of this command: a retry over a failover has one effect.
    request = getattr(admin_pb2, f"{method}Request")(request_id=uuid.uuid4().hex, **fields)
    reply: admin_pb2.AdminReply = target.ask(
        lambda control: control.call(f"AdminService.{method}", request, timeout_s=ANSWER_LIMIT_S)
    )
    if as_json:
        print_json({"accepted": reply.accepted, "message": reply.message})
    if not reply.accepted:
        raise UserError(f"refused: {reply.message}")
    if not as_json:
        typer.echo(reply.message or "done")
