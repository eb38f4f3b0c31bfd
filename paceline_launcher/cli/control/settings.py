"""``paceline set``: changes settings of a run while it runs."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import UserError
from paceline_launcher.cli.common import JsonOption, Target, print_json, takes_target
from paceline_launcher.cli.control.admin import ANSWER_LIMIT_S

if TYPE_CHECKING:
    from paceline.v1 import admin_pb2


@takes_target
def set_settings(
    target: Target,
    settings: Annotated[
        list[str], typer.Argument(metavar="A.B=C...", help="Settings and their new values.")
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check only, and show what would change.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Change settings of a run while it runs, without a restart.

    Learning rate and schedule, the number of steps, staleness, evaluations, checkpoints, sampling
    limits and time limits can change. All replicas use the new value from the same step on, and the
    journal keeps old and new value. A setting that is fixed is refused, with the way that works.

    Example: paceline set train.lr=5e-7 train.eval_every=20 --run-dir runs/demo
    """
    from paceline.config.load import parse_setting
    from paceline.v1 import admin_pb2

    asked = dict(parse_setting(text, "") for text in settings)
    # One id for all tries of this command: a retry over a failover has one effect.
    request = admin_pb2.SettingsRequest(
        request_id=uuid.uuid4().hex,
        settings={name: json.dumps(value, default=str) for name, value in asked.items()},
        dry_run=dry_run,
    )
    reply: admin_pb2.SettingsReply = target.ask(
        lambda control: control.call(
            "AdminService.ChangeSettings", request, timeout_s=ANSWER_LIMIT_S
        )
    )
    if as_json:
        body = {"accepted": reply.accepted, "message": reply.message, "dry_run": dry_run}
        print_json({**body, "changes": [_change(one) for one in reply.changes]})
    if not reply.accepted:
        raise UserError(f"refused: {reply.message}")
    if not as_json:
        typer.echo(reply.message)
        if dry_run:
            for one in reply.changes:
                typer.echo(f"  {one.name}: {one.old} -> {one.new} from step {one.step}")


def _change(one: admin_pb2.SettingChange) -> dict[str, Any]:
    values = {"old": json.loads(one.old), "new": json.loads(one.new)}
    return {"name": one.name, **values, "step": one.step}
