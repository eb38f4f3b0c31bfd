"""``paceline plan memory``."""

import typer

from paceline.config.load import load_config
from paceline_launcher.cli.common import ConfigArgument, SetOption


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
    from paceline.memory_plan import GIB, RESERVE, found_gpu, memory_plan, named_gpu, problems
    from paceline.model_shape import read_shape
    from paceline_launcher.preflight.models import check_model_config

    resolved = load_config(config, overrides or ())
    device = named_gpu(gpu) if gpu is not None else found_gpu()
    check_model_config(resolved.model.path)
    shape = read_shape(resolved)
    plans = memory_plan(resolved, shape)
    typer.echo(f"{resolved.model.path}: {shape.parameters / 1e9:.2f} B parameters")
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
