"""``paceline config check | docs``."""

from __future__ import annotations

import typer

from paceline.cli.common import ConfigArgument, JsonOption, SetOption, print_json

config = typer.Typer(
    help="Check a configuration, or describe all settings.\n\nExample: paceline config check run.toml",
    no_args_is_help=True,
)


@config.command()
def check(config: ConfigArgument, overrides: SetOption = None, as_json: JsonOption = False) -> None:
    """Print the resolved configuration as TOML or JSON, and warnings on standard error.

    Example: paceline config check demo.toml --set train.lr=3e-4
    """
    from paceline.config.load import load_config, to_toml
    from paceline.preflight.config_warnings import config_warnings

    resolved = load_config(config, overrides or ())
    if as_json:
        print_json(resolved.model_dump(mode="json"))
    else:
        typer.echo(to_toml(resolved), nl=False)
    for found in config_warnings(resolved):
        if found.state != "ok":
            # Standard output stays a configuration that can be read back.
            typer.echo(f"warning: {found}", err=True)


@config.command()
def docs() -> None:
    """Print the reference of all settings as Markdown.

    Example: paceline config docs > docs/configuration.md
    """
    from paceline.config.reference import reference

    typer.echo(reference(), nl=False)
