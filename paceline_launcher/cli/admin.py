"""``paceline scale | drain | hosts | pause | resume | checkpoint | stop | set``: requests."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.config.load import parse_setting
from paceline.errors import BadInput, UserError, plural
from paceline.worker_pools import TRAINING
from paceline_launcher.cli.common import ANSWER_LIMIT_S, JsonOption, Target, is_number, print_json

if TYPE_CHECKING:
    from paceline.rpc.client import ControlPlane
    from paceline.v1 import admin_pb2

POLL_S = 0.5
MOST = 10_000  # largest number that the controllers accept
Seconds = Annotated[float, typer.Option(min=0.0)]


def scale(counts: list[str] | None = None, *, target: Target) -> None:
    """Change the desired number of workers of a running fleet.

    Without counts it shows the desired ones, and who holds the devices that workers use in turn.
    The answer says who starts or drains workers until their number is the desired one: `paceline
    up`, a provider (fleet.provider), or nobody, and then what to do.

    Example: paceline scale policy=3 rollout=4 --run-dir runs/demo

    Args:
        counts ROLE=COUNT...: policy=2, rollout=4, scorer:NAME=2; or training=2 for lent devices.
    """
    if not counts:
        _show_fleet(target.ask(_status))
        return
    desired: dict[str, int] = {}
    for item in counts:
        role, _, count = item.partition("=")
        if role in desired or not is_number(count, 1, MOST):
            raise BadInput(
                f"{item}: write each role once, as policy=COUNT, rollout=COUNT or "
                f"scorer:NAME=COUNT, COUNT from 1 to {MOST:,}"
            )
        desired[role] = int(count)
    _ask("Scale", {"desired": desired}, target)


def _show_fleet(status: admin_pb2.StatusReply) -> None:
    from paceline_launcher.live_view import seat_lines

    counts = {**status.desired, **({TRAINING: n} if (n := status.training_seats) else {})}
    typer.echo("desired: " + ", ".join(f"{k}={n}" for k, n in sorted(counts.items())))
    for line in seat_lines(status):
        typer.echo(line)


def drain(worker: str, *, target: Target, replace: bool = False, wait: Seconds = 0.0) -> None:
    """Let one worker finish its tasks and leave.

    The desired number goes down by one, unless --replace is given.

    Example: paceline drain rollout-1 --run-dir runs/demo

    Args:
        worker WORKER: Id of the worker, see paceline status.
        replace: Keep the desired number: another worker takes its place.
        wait SECONDS: Wait for it to leave, at most this long.
    """
    _ask("Drain", {"worker_id": worker, "replace": replace}, target)
    meant, deadline = 0, time.monotonic() + wait
    while wait:
        status = target.ask(_status)
        here = next((w for w in status.workers if w.worker_id == worker), None)
        if here is None or here.state in ("stopped", "dead"):
            return
        # Another process may have its name by now.
        meant = meant or here.incarnation
        if here.incarnation != meant or status.phase in ("finished", "failed"):
            return
        if time.monotonic() > deadline:
            raise UserError(f"{worker} has not left within {wait:g} s")
        time.sleep(POLL_S)


def hosts(
    action: Annotated[str | None, typer.Argument(metavar="[allow|block]")] = None,
    host: str | None = None,
    *,
    target: Target,
    as_json: JsonOption = False,
) -> None:
    """Show the hosts that had faults, let a blocked one in again, or block one.

    A host with fleet.host_faults faults of its workers within fleet.host_window_s gets no new work:
    its workers finish what they hold and stand by. The last host that can do a role is kept.

    Example: paceline hosts allow node-7 --run-dir runs/demo

    Args:
        action allow|block: What to do with HOST; without it the hosts are shown.
        host HOST: Name of the host, see paceline hosts.
    """
    if action is None:
        _show_hosts(target.ask(_status), as_json)
    elif action not in ("allow", "block") or not host:
        raise BadInput(
            "write: paceline hosts, paceline hosts allow HOST, or paceline hosts block HOST"
        )
    else:
        _ask("Host", {"host": host, "blocked": action == "block"}, target, "SetHost")


def _show_hosts(status: admin_pb2.StatusReply, as_json: bool) -> None:
    if as_json:
        hosts_now = {h.host: {"faults": h.faults, "blocked": h.blocked} for h in status.hosts}
        print_json(hosts_now)
        return
    for one in status.hosts:
        state = f"blocked: {one.blocked}" if one.blocked else "works"
        typer.echo(f"{one.host}: {plural(one.faults, 'fault')}, {state}")
    if not status.hosts:
        typer.echo("no host had a fault lately")


def pause(*, target: Target) -> None:
    """Start no new step and lease no new task until `paceline resume`.

    Example: paceline pause --run-dir runs/demo
    """
    _ask("Pause", {"paused": True}, target)


def resume(*, target: Target) -> None:
    """Continue a paused run.

    Example: paceline resume --run-dir runs/demo
    """
    _ask("Pause", {"paused": False}, target)


def checkpoint(*, target: Target) -> None:
    """Write a checkpoint beside the regular ones, after the next step.

    `paceline events --follow` tells when it is written.

    Example: paceline checkpoint --run-dir runs/demo
    """
    _ask("SaveCheckpoint", {}, target)


def stop(*, target: Target, reason: str = "paceline stop") -> None:
    """End a run for good, after the open step and with a final checkpoint.

    To continue the run later, interrupt `paceline up` with Ctrl-C instead.

    Example: paceline stop --run-dir runs/demo --reason "good enough"

    Args:
        reason: Recorded in the run's events.
    """
    _ask("Stop", {"reason": reason}, target)


def set_settings(settings: list[str], *, target: Target, dry_run: bool = False) -> None:
    """Change settings of a run while it runs, without a restart.

    Learning rate and schedule, the number of steps, staleness, evaluations, checkpoints, sampling
    limits and time limits can change. All replicas use the new value from the same step on, and the
    journal keeps old and new value. A setting that is fixed is refused, with the way that works.

    Example: paceline set train.optimizer.lr=5e-7 train.eval_every=20 --run-dir runs/demo

    Args:
        settings A.B=C...: Settings and their new values.
        dry_run: Check only, and show what would change.
    """
    asked = dict(parse_setting(text, "") for text in settings)
    values = {name: json.dumps(value, default=str) for name, value in asked.items()}
    fields = {"settings": values, "dry_run": dry_run}
    _ask("Settings", fields, target, method="ChangeSettings")


def _ask(name: str, fields: dict[str, Any], target: Target, method: str = "") -> None:
    """Sends ``<name>Request`` and prints the reply. Raises UserError if it is refused."""
    reply = target.request(name, fields, method)
    typer.echo(reply.message or "done")
    for c in reply.changes if fields.get("dry_run") else ():
        typer.echo(f"  {c.name}: {c.old} -> {c.new} from step {c.step}")


async def _status(control: ControlPlane) -> admin_pb2.StatusReply:
    from paceline.observe.run_watcher import leader_status

    return await leader_status(control, ANSWER_LIMIT_S)
