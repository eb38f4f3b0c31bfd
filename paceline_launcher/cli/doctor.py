"""``paceline doctor`` and ``paceline alerts``."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import BadInput
from paceline_launcher.cli.common import (
    ConfigArgument,
    JsonOption,
    RunDirOption,
    SetOption,
    print_json,
)

if TYPE_CHECKING:
    from paceline_launcher.preflight.findings import Finding

STYLES: dict[str, dict[str, Any]] = {
    "ok": {"fg": "green"},
    "warn": {"fg": "yellow"},
    "fail": {"fg": "red", "bold": True},
    "skip": {"dim": True},
}


def doctor(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="Also check what this run needs.")
    ] = None,
    overrides: SetOption = None,
    run_dir: RunDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check that this machine is ready for a run, and print a remedy for each problem.

    Checks packages, GPUs, Redis, shared memory and disk. With CONFIG, it checks what that run
    needs. Exit status 1 if a check fails; a warning is not a failure.

    Example: paceline doctor run.toml
    """
    from paceline.config.load import load_config
    from paceline_launcher.preflight.checks import Place, default_run_dir, run_checks
    from paceline_launcher.preflight.findings import Start

    settings = load_config(config, overrides or ()) if config is not None else None
    directory = run_dir or (default_run_dir(settings) if settings else Path("runs"))
    findings: list[Finding] = []
    for finding in run_checks(Start(settings, directory), ~Place(0)):
        findings.append(finding)
        if not as_json:
            typer.echo(_line(finding))
    failed = [finding for finding in findings if finding.state == "fail"]
    if as_json:
        print_json({"ok": not failed, "checks": [asdict(finding) for finding in findings]})
    else:
        warned = sum(finding.state == "warn" for finding in findings)
        typer.echo(f"{len(findings)} checks, {warned} warnings, {len(failed)} failures")
    raise typer.Exit(1 if failed else 0)


def _line(check: Finding) -> str:
    state = typer.style(f"{check.state:<5}", **STYLES[check.state])
    remedy = f"\n{'':<21}→ {check.remedy}" if check.remedy else ""
    return f"{state} {check.name:<15} {check.found}{remedy}"


alerts = typer.Typer(
    name="alerts",
    help="Alerts of a run.\n\nExample: paceline alerts test run.toml",
    no_args_is_help=True,
)


@alerts.callback()
def _group() -> None:
    """Alerts of a run."""


@alerts.command()
def test(config: ConfigArgument, overrides: SetOption = None, as_json: JsonOption = False) -> None:
    """Send a test alert to the webhook and the command of the `alerts` settings.

    Exit status 1 if it is not delivered.

    Example: paceline alerts test run.toml

    Example: paceline alerts test run.toml --set alerts.webhook_file=/etc/paceline/webhook
    """
    from paceline.config.load import load_config
    from paceline.observe.alerts import Alert, NotDelivered, deliver

    loaded = load_config(config, overrides or [])
    if loaded.alerts.webhook_file is None and not loaded.alerts.command:
        raise BadInput(
            f"{config}: [alerts] names no receiver. Set alerts.webhook_file or alerts.command"
        )
    alert = Alert("end", "test", "this is a test of the run's alerts", time.time())
    problem = None
    try:
        deliver(loaded.alerts, alert.message(loaded.run.name))
    except NotDelivered as why:
        problem = str(why)
    if as_json:
        print_json({"delivered": problem is None, "problem": problem})
    else:
        typer.echo(f"not delivered: {problem}" if problem else "delivered", err=bool(problem))
    raise typer.Exit(0 if problem is None else 1)
