"""``paceline init`` and ``paceline config check | docs``."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

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
    as_json: JsonOption = False,
) -> None:
    """Print the resolved configuration as TOML or JSON, and warnings and errors on standard error.
    Passwords are masked.

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

    resolved = load_config(config, overrides or ())
    if as_json:
        print_json(masked_settings(resolved.model_dump(mode="json")))
    else:
        typer.echo(to_toml(resolved, mask=True), nl=False)
    start = Start(resolved, run_dir or default_run_dir(resolved))
    at = Place.ANYWHERE if settings_only else Place.ANYWHERE | Place.CONTROL | Place.WORKERS
    failed = []
    for found in run_checks(start, at):
        # Standard output stays a configuration that can be read back.
        if found.state == "warn":
            typer.echo(f"warning: {found}", err=True)
        elif found.state == "fail":
            failed.append(str(found))
        elif found.state == "skip":
            typer.echo(f"not checked: {found.name}: {found}", err=True)
        elif found.name in (FIRST_ROW, LENGTH):
            typer.echo(f"{found.name}: {found}", err=True)
    if failed:
        raise BadInput("\n".join(failed))


@config.command()
def docs() -> None:
    """Print the reference of all settings as Markdown.

    Example: paceline config docs > docs/configuration.md
    """
    from paceline.config.reference import reference

    typer.echo(reference(), nl=False)
