"""``paceline check-objective``."""

from typing import Annotated, Any

import typer

from paceline_launcher.cli.common import JsonOption, print_json


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
    from policy_worker.conformance import conformance

    found = conformance(name, settings["objective"], settings["train"])
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
