"""``paceline doctor | plan memory | alerts test``: what a run needs, before it starts."""

import time
from dataclasses import asdict
from pathlib import Path

import typer

from paceline.config.load import load_config
from paceline.errors import BadInput, plural
from paceline_launcher.cli.common import (
    ConfigArgument,
    JsonOption,
    RunDirOption,
    SetOption,
    print_json,
)

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(
    config: Path | None = None,
    *,
    overrides: SetOption = None,
    run_dir: RunDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check that this machine is ready for a run, and print a remedy for each problem.

    Checks packages, GPUs, Redis, shared memory and disk. With CONFIG, it checks what that run
    needs. Exit status 1 if a check fails; a warning is not a failure.

    Example: paceline doctor run.toml

    Args:
        config [CONFIG]: Also check what this run needs.
    """
    from paceline_launcher.preflight.checks import Place, default_run_dir, run_checks
    from paceline_launcher.preflight.findings import Start

    settings = load_config(config, overrides or ()) if config is not None else None
    directory = run_dir or (default_run_dir(settings) if settings else Path("runs"))
    findings = []
    for found in run_checks(Start(settings, directory), ~Place(0)):
        findings.append(found)
        if not as_json:
            state = typer.style(f"{found.state:<5}", fg=COLOURS.get(found.state))
            remedy = f"\n{'':<21}→ {found.remedy}" if found.remedy else ""
            typer.echo(f"{state} {found.name:<15} {found.found}{remedy}")
    states = [finding.state for finding in findings]
    failed, warned = states.count("fail"), states.count("warn")
    if as_json:
        print_json({"ok": not failed, "checks": [asdict(finding) for finding in findings]})
    else:
        counts = ((len(findings), "check"), (warned, "warning"), (failed, "failure"))
        typer.echo(", ".join(plural(count, noun) for count, noun in counts))
    raise typer.Exit(1 if failed else 0)


def memory(config: ConfigArgument, *, gpu: str | None = None, overrides: SetOption = None) -> None:
    """Print the bytes that a policy rank and a rollout worker need, by part, and what to change if
    they do not fit.

    It reads the model's config.json, never its weights. Exit status: 0 if all fits or no GPU is
    known, 1 if not.

    Example: paceline plan memory run.toml --gpu h100-80g --set fleet.policy_ranks=8

    Args:
        gpu NAME: GPU to plan for, such as h100-80g, or its size in GiB, as in 80g. Default: the
            smallest of this machine.
    """
    from paceline.memory_plan import (
        GIB,
        RESERVE,
        found_gpu,
        memory_plan,
        named_gpu,
        problems,
        settled,
    )
    from paceline.model_shape import read_shape, scorer_shapes
    from paceline_launcher.preflight.models import check_model_config

    resolved = load_config(config, overrides or ())
    device = named_gpu(gpu) if gpu is not None else found_gpu()
    check_model_config(resolved.model.path)
    shape = read_shape(resolved)
    if device is not None:
        resolved = settled(resolved, shape, device)
    plans = memory_plan(resolved, shape, scorer_shapes(resolved) if resolved.takes_turns else {})
    typer.echo(f"{resolved.model.path}: {shape.parameters / 1e9:.2f} B parameters")
    again = "with" if resolved.model.recomputes else "without"
    typer.echo(f"rows of {resolved.train.memory.row_tokens} tokens, {again} recomputation")
    for plan in plans:
        for where, parts in (("device", plan.gpu), ("host", plan.host)):
            typer.echo(f"\n{plan.name}, {where}")
            for part, size in {**parts, "sum": sum(parts.values())}.items():
                typer.echo(f"  {part:<32}{size / GIB:>9.2f} GiB")
    if device is None:
        typer.echo("\nno GPU found: --gpu NAME says whether this fits")
        return
    wrong = list(problems(plans, device))
    room = f"{device.bytes * RESERVE / GIB:.1f} of {device.bytes / GIB:.1f} GiB"
    typer.echo(f"\n{device.name} ({room} to give): {'does not fit' if wrong else 'fits'}")
    for found, remedy in wrong:
        typer.echo(f"{found}. {remedy}")
    if wrong:
        raise typer.Exit(1)


def test(config: ConfigArgument, *, overrides: SetOption = None) -> None:
    """Send a test alert to the webhook and the command of the `alerts` settings.

    Exit status 1 if it is not delivered.

    Example: paceline alerts test run.toml --set alerts.webhook_file=/etc/paceline/webhook
    """
    from controller.export.alert_delivery import Alert, NotDelivered, deliver

    loaded = load_config(config, overrides or [])
    if loaded.alerts.webhook_file is None and not loaded.alerts.command:
        raise BadInput(
            f"{config}: [alerts] names no receiver. Set alerts.webhook_file or alerts.command"
        )
    alert = Alert("end", "test", "this is a test of the run's alerts", time.time())
    try:
        deliver(loaded.alerts, alert.message(loaded.run.name))
    except NotDelivered as why:
        typer.echo(f"not delivered: {why}", err=True)
        raise typer.Exit(1) from None
    typer.echo("delivered")
