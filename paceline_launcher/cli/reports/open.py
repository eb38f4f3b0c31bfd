"""``paceline open``: the page of a run that is over."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import BadInput
from paceline.rpc.addresses import written_by_controllers
from paceline_launcher.cli.common import given_or_default


def open_run(
    run_dir: Annotated[
        Path | None, typer.Argument(metavar="RUN_DIR", help="Default: the newest in ./runs.")
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0: any free one.")
    ] = 0,
) -> None:
    """Serve the page and the REST interface of a run that is over, from its directory.

    Curves, events, settings and archived samples are those of the run. Nothing is written. Of a run
    that goes on, its own page is named. Ctrl-C ends it.

    Example: paceline open runs/demo
    """
    from controller.rest.past_run import bind_loopback, serve_past_run
    from paceline.observe.runs import is_run, read_run
    from paceline.rpc.auth import dashboard_link

    run_dir = given_or_default(run_dir)
    if not is_run(run_dir):
        raise BadInput(f"{run_dir} is no run directory: it has no events.jsonl and no config.toml")
    if read_run(run_dir).state == "running":
        pages = " or ".join(written_by_controllers(run_dir, "rest"))
        raise BadInput(f"the run in {run_dir} goes on: open {pages or 'the page of a controller'}")
    door, url = bind_loopback(port)
    token = secrets.token_hex(24)
    typer.echo(f"{run_dir}: {dashboard_link(url, token)}")
    typer.echo("Ctrl-C ends it.")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve_past_run(run_dir, door, token=token))
