"""``paceline doctor``."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline_launcher.cli.common import (
    JsonOption,
    SetOption,
    Target,
    parse_addresses,
    print_json,
    run_addresses,
    takes_target,
)

if TYPE_CHECKING:
    from paceline_launcher.preflight.findings import Finding

STYLES: dict[str, dict[str, Any]] = {
    "ok": {"fg": "green"},
    "warn": {"fg": "yellow"},
    "fail": {"fg": "red", "bold": True},
    "skip": {"dim": True},
}


@partial(takes_target, optional=True)
def doctor(
    target: Target,
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="Also check what this run needs.")
    ] = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check that this machine is ready for a run, and print a remedy for each problem.

    Checks packages, GPUs, Redis, ports, shared memory, limits, disk and cores. With CONFIG, it
    checks what that run needs. With --controllers or --run-dir, it also asks the controllers. Exit
    status 1 if a check fails; a warning is not a failure.

    Example: paceline doctor run.toml --controllers a:7000,b:7000
    """
    from paceline.config.load import load_config
    from paceline_launcher.preflight.checks import Place, default_run_dir, run_checks
    from paceline_launcher.preflight.findings import Start

    settings = load_config(config, overrides or ()) if config is not None else None
    addresses = parse_addresses(target.controllers) if target.controllers else []
    run_dir = target.run_dir
    if run_dir is not None:
        over = (run_dir / "summary.json").is_file()
        if not addresses and not over and (run_dir / "controllers").is_dir():
            addresses = run_addresses(run_dir)
        kept = run_dir / "config.toml"
        if settings is None and kept.is_file():
            settings = load_config(kept, stored=True)
    auth = target.auth(settings.auth if settings else None)
    directory = run_dir or (default_run_dir(settings) if settings else Path("runs"))
    findings: list[Finding] = []
    start = Start(settings, directory, controllers=addresses, auth=auth)
    for finding in run_checks(start, ~Place(0)):
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
