"""``paceline init``, ``paceline config check | docs`` and ``paceline check-objective``."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.errors import BadInput
from paceline.masking import masked_settings
from paceline_launcher.cli.common import (
    ConfigArgument,
    JsonOption,
    RunDirOption,
    SetOption,
    print_json,
)

DEFAULT = Path("run.toml")
config = typer.Typer(
    name="config",
    help="Check a configuration, or describe all settings.\n\nExample: paceline config check "
    "run.toml",
    no_args_is_help=True,
)


def _choices(table: str) -> Callable[[], list[str]]:
    return lambda: list(getattr(importlib.import_module("paceline.config.template"), table))


def init(
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="File to write; - for standard output.")
    ] = DEFAULT,
    algorithm: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="For sampled completions: grpo, dr_grpo, dapo, decoupled, interpolated, ppo or "
            "online_dpo. For recorded data: sft, dpo or reward_model.",
            autocompletion=_choices("ALGORITHMS"),
        ),
    ] = "grpo",
    size: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="tiny, small, 7b, 32b or 70b.", autocompletion=_choices("SIZES")
        ),
    ] = "tiny",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a commented configuration for an algorithm and a model size.

    Example: paceline init --algorithm dr_grpo --size small run.toml

    Example: paceline init --algorithm dpo pairs.toml
    """
    from paceline.config.template import ALGORITHMS, SIZES, commands, template

    for option, value, known in (("--algorithm", algorithm, ALGORITHMS), ("--size", size, SIZES)):
        if value not in known:
            raise BadInput(f"{option} {value}: choose {', '.join(known)}")
    if str(out) == "-":
        text = template(algorithm, size, str(DEFAULT))
        if as_json:
            print_json({"written": None, "algorithm": algorithm, "size": size, "toml": text})
        else:
            typer.echo(text, nl=False)
        return
    text = template(algorithm, size, str(out))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # Exclusive: a file that another process creates now is not replaced either.
        with out.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise BadInput(f"{out} exists: --force replaces it") from None
    except OSError as error:
        raise BadInput(f"{out}: cannot be written: {error.strerror or error}") from None
    if as_json:
        print_json({"written": str(out), "algorithm": algorithm, "size": size})
        return
    typer.echo(f"wrote {out}: edit [model] and [data], then")
    typer.echo(f"    paceline config check {out}")
    for line in commands(algorithm, size, str(out)):
        typer.echo(f"    {line}")


@config.command()
def check(
    config: ConfigArgument,
    overrides: SetOption = None,
    run_dir: RunDirOption = None,
    settings_only: Annotated[
        bool,
        typer.Option(
            "--settings-only",
            help="Check the settings alone, for example on a machine without the run's files.",
        ),
    ] = False,
    resolved: Annotated[
        bool,
        typer.Option("--resolved", help="Print all settings as TOML, passwords masked."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Say whether a configuration is valid, with warnings and errors on standard error.

    The checks are those of `paceline up`: files, data rows, rewards, access, ports, Redis and the
    run that the directory holds already. Exit status 2 if one of them fails.

    Example: paceline config check demo.toml --set train.optimizer.lr=3e-4
    """
    from paceline.config.load import load_config, to_toml
    from paceline_launcher.preflight.checks import (
        FIRST_ROW,
        LENGTH,
        Place,
        default_run_dir,
        run_checks,
    )
    from paceline_launcher.preflight.findings import Start

    settings = load_config(config, overrides or ())
    start = Start(settings, run_dir or default_run_dir(settings))
    at = Place.ANYWHERE if settings_only else Place.ANYWHERE | Place.CONTROL | Place.WORKERS
    found = list(run_checks(start, at))
    failed = [str(check) for check in found if check.state == "fail"]
    if not failed:
        # With --resolved or --json, standard output is a configuration that can be read back.
        typer.echo(f"valid: {config}", err=resolved or as_json)
    for check in found:
        if check.state == "warn":
            typer.echo(f"warning: {check}", err=True)
        elif check.state == "skip":
            typer.echo(f"not checked: {check.name}: {check}", err=True)
        elif check.state == "ok" and check.name in (FIRST_ROW, LENGTH):
            typer.echo(f"{check.name}: {check}", err=True)
    if as_json:
        print_json(masked_settings(settings.model_dump(mode="json")))
    elif resolved:
        typer.echo(to_toml(settings, mask=True), nl=False)
    if failed:
        raise BadInput("\n".join(failed))


@config.command()
def docs() -> None:
    """Print the reference of all settings as Markdown.

    Example: paceline config docs > docs/configuration.md
    """
    from paceline.config.reference import reference

    typer.echo(reference(), nl=False)


def check_objective(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="One that is built in, such as grpo or dpo, or a class of yours: "
            "package.module:Class.",
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="A.B=C", help="A setting of [objective] or [train]; may be repeated."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Try an objective on a toy model: whether its gradients are the same however a fleet splits a
    step.

    Exit status: 0 if every property holds, 1 if one does not, 2 if the objective cannot be loaded.

    Example: paceline check-objective grpo --set train.loss.kl_coef=0.1

    Example: paceline check-objective my_objectives:Reinforce --set objective.baseline=false
    """
    from paceline.config.load import ConfigError, parse_setting

    settings: dict[str, dict[str, Any]] = {"objective": {}, "train": {}}
    for text in overrides or ():
        dotted, value = parse_setting(text)
        section, *tables, field = dotted.split(".")
        if section not in settings:
            raise ConfigError(f"--set {text}: name a setting of [objective] or [train]")
        fields = settings[section]
        for table in tables:
            fields = fields.setdefault(table, {})
        fields[field] = value
    typer.echo("loading torch, then a toy model: about a minute in all", err=True)
    from policy_worker.conformance import conformance

    def begins(tried: str, number: int, count: int) -> None:
        typer.echo(f"{number} of {count}: {tried}", err=True)

    found = conformance(name, settings["objective"], settings["train"], begins)
    if as_json:
        print_json(
            [{"property": p.name, "holds": not p.problem, "problem": p.problem} for p in found]
        )
    else:
        for each in found:
            typer.echo(f"{'FAILS' if each.problem else 'ok':<6}{each.name}")
            if each.problem:
                typer.echo(f"      {each.problem}")
    if any(each.problem for each in found):
        raise typer.Exit(1)
