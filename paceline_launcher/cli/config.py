"""``paceline init | config check | check-objective | check-reward``."""

import importlib
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.config.load import ConfigError, load_config, parse_setting, to_toml
from paceline.errors import BadInput, did_you_mean
from paceline_launcher.cli.common import (
    ConfigArgument,
    RunDirOption,
    SetOption,
    write_new,
)

DEFAULT = Path("run.toml")


def _choices(table: str) -> Any:
    def names() -> list[str]:
        return list(getattr(importlib.import_module("paceline.config.template"), table))

    return typer.Option(autocompletion=names)


def init(
    out: Path = DEFAULT,
    *,
    algorithm: Annotated[str, _choices("ALGORITHMS")] = "grpo",
    size: Annotated[str, _choices("SIZES")] = "tiny",
    lora: bool = False,
    force: bool = False,
) -> None:
    """Write a commented configuration for an algorithm and a model size.

    Example: paceline init --algorithm dr_grpo --size small run.toml

    Args:
        out OUT: File to write; - for standard output.
        algorithm NAME: For sampled completions: grpo, dr_grpo, dapo, decoupled, interpolated, ppo
            or online_dpo. For recorded data: sft, dpo or reward_model.
        size NAME: tiny, small, 7b, 32b or 70b.
        lora: Train adapters instead of the whole model.
        force: Replace an existing file.
    """
    from paceline.config.template import ALGORITHMS, SIZES, commands, template, template_settings

    for option, value, known in (("--algorithm", algorithm, ALGORITHMS), ("--size", size, SIZES)):
        if value not in known:
            meant = did_you_mean(value, known)
            raise BadInput(f"{option} {value}: {meant}choose {', '.join(known)}")
    example = Path(template_settings(algorithm, size)["data"]["path"])
    if example.parts[0] == "examples" and not example.is_file():
        raise BadInput(
            f"--size {size} trains an example of Paceline's repository, and {Path.cwd()} has no "
            f"{example}. Start this command in the root of the repository, or give --size small "
            "and your own model and data (docs/troubleshooting.md makes a tiny model)"
        )
    if str(out) == "-":
        typer.echo(template(algorithm, size, str(DEFAULT), lora=lora), nl=False)
        return
    text = template(algorithm, size, str(out), lora=lora)
    write_new(out, text, force=force)
    typer.echo(f"wrote {out}: edit [model] and [data], then")
    for line in (f"paceline config check {out}", *commands(algorithm, size, str(out), lora=lora)):
        typer.echo(f"    {line}")


def check(
    config: ConfigArgument,
    *,
    overrides: SetOption = None,
    run_dir: RunDirOption = None,
    settings_only: bool = False,
    resolved: bool = False,
) -> None:
    """Say whether a configuration is valid, with warnings and errors on standard error.

    The checks are those of `paceline up`: files, data rows, rewards, access, ports, Redis and the
    run that the directory holds already. Exit status 2 if one of them fails.

    Example: paceline config check demo.toml --set train.optimizer.lr=3e-4

    Args:
        settings_only: Check the settings alone, for example on a machine without the run's files.
        resolved: Print all settings as TOML, passwords masked.
    """
    from paceline_launcher.preflight.checks import (
        FIRST_ROW,
        LENGTH,
        Place,
        default_run_dir,
        passed,
    )
    from paceline_launcher.preflight.findings import Start

    settings = load_config(config, overrides or ())
    start = Start(settings, run_dir or default_run_dir(settings))
    at = Place.ANYWHERE if settings_only else Place.ANYWHERE | Place.CONTROL | Place.WORKERS
    found = passed(start, at)
    # With --resolved, standard output is a configuration that can be read back.
    typer.echo(f"valid: {config}", err=resolved)
    for check in found:
        told = check.state == "ok" and check.name in (FIRST_ROW, LENGTH)
        if told or check.state == "skip":
            typer.echo(f"{'' if told else 'not checked: '}{check.name}: {check}", err=True)
    if resolved:
        typer.echo(to_toml(settings, mask=True), nl=False)


def check_objective(name: str, *, overrides: SetOption = None) -> None:
    """Try an objective on a toy model: whether its gradients are the same however a fleet splits a
    step.

    Exit status: 0 if every property holds, 1 if one does not, 2 if the objective cannot be loaded.

    Example: paceline check-objective my_objectives:Reinforce --set objective.baseline=false

    Args:
        name NAME: One that is built in, such as grpo or dpo, or a class of yours:
            package.module:Class.
        overrides --set A.B=C: A setting of [objective] or [train]; may be repeated.
    """
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
    typer.echo("loading torch and a toy model: about a minute in all", err=True)
    from policy_worker.conformance import conformance

    found = conformance(
        *(name, settings["objective"], settings["train"]),
        lambda each: typer.echo(f"trying: {each}", err=True),
    )
    for each in found:
        typer.echo(f"{'FAILS' if each.problem else 'ok':<6}{each.name}")
        if each.problem:
            typer.echo(f"      {each.problem}")
    if any(each.problem for each in found):
        raise typer.Exit(1)


def check_reward(
    config: ConfigArgument,
    *,
    row: int = 0,
    completion: str | None = None,
    overrides: SetOption = None,
) -> None:
    """Call the rewards, or the environment, of a run on one row and one completion.

    It prints the value of each function, or the traceback. No model and no fleet is started.

    Exit status: 0 if there is a reward, 1 if there is none, 2 if a function cannot be imported.

    Example: paceline check-reward run.toml --row 17 --completion "The answer is 12"

    Args:
        row N: Number of the row, from 0.
        completion TEXT: What the model said. @FILE reads it.
    """
    from paceline.dataset.training_rows import open_training_rows
    from paceline_launcher.preflight.user_code import try_import

    settings = load_config(config, overrides or ())
    if completion is not None and completion.startswith("@"):
        completion = Path(completion[1:]).read_text()
    rows = open_training_rows(settings.data)[0]
    if not 0 <= row < len(rows):
        raise BadInput(f"--row {row}: the data has the rows 0 to {len(rows) - 1}")
    tried = try_import(
        "rollout_worker.check_rewards",
        "reward",
        config=settings.model_dump(mode="json"),
        row=rows[row],
        completion=completion,
    )
    if tried.problem:
        raise BadInput(tried.problem)
    trial: dict[str, Any] = json.loads(tried.lines[-1])
    lines = [*tried.lines[:-1], *(f"{v:>10g}  {name}" for name, v in trial["values"].items())]
    lines += [trial["trace"].rstrip()] if trial["trace"] else []
    last = f"no reward: {trial['problem']}"
    lines.append(last if trial["problem"] else f"{trial['reward']:>10g}  the reward, weighted")
    typer.echo("\n".join(lines))
    if trial["problem"]:
        raise typer.Exit(1)
