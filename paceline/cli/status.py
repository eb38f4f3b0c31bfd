"""``paceline status``."""

from __future__ import annotations

import typer

from paceline.cli.common import (
    BadInput,
    ControllersOption,
    JsonOption,
    RunDirOption,
    TlsOption,
    TokenOption,
    last_known,
    print_json,
    with_control,
)

ANSWER_LIMIT_S = 3.0


def status(
    run_dir: RunDirOption = None,
    controllers: ControllersOption = None,
    as_json: JsonOption = False,
    token_file: TokenOption = None,
    tls_ca: TlsOption = None,
) -> None:
    """Show the state of a run: processes, leader and term, step and tasks.

    Example: paceline status --run-dir runs/demo --json
    """
    from paceline.cli.messages import as_dict
    from paceline.rpc.client import ControlPlane, ControlPlaneUnavailable
    from paceline.run_view.event_follower import leader_status
    from paceline.v1 import admin_pb2

    async def ask(control: ControlPlane) -> admin_pb2.StatusReply:
        return await leader_status(control, ANSWER_LIMIT_S)

    try:
        reply = with_control(run_dir, controllers, token_file, tls_ca, ask)
    except (ControlPlaneUnavailable, BadInput) as error:
        if run_dir is not None and (last := last_known(run_dir)):
            raise ControlPlaneUnavailable(f"the run in {run_dir} is not running: {last}") from error
        raise
    if as_json:
        print_json(as_dict(reply))
        return
    from paceline.console.status_tables import fleet_table, headline, progress_table
    from paceline.console.terminal import out_console

    console = out_console()
    console.print(headline(reply), markup=False, highlight=False)
    console.print(progress_table(reply))
    console.print(fleet_table(reply))
    for one in reply.controllers:
        if one.rest and one.state != "silent":
            console.print(
                f"dashboard ({one.controller_id}): {one.rest}", markup=False, highlight=False
            )


def register(app: typer.Typer) -> None:
    app.command()(status)
