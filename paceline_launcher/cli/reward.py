"""``paceline check-reward``."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline_launcher.cli.common import JsonOption, SetOption, print_json


def check_reward(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="Configuration of the run.")],
    row: Annotated[int, typer.Option("--row", metavar="N", help="Number of the row, from 0.")] = 0,
    completion: Annotated[
        str | None,
        typer.Option("--completion", metavar="TEXT", help="What the model said. @FILE reads it."),
    ] = None,
    failure: Annotated[
        Path | None,
        typer.Option(
            "--failure",
            metavar="FILE",
            help="Call it on what it failed on in a run: RUN_DIR/failed-rewards/*.json.",
        ),
    ] = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Call the rewards, or the environment, of a run on one row and one completion.

    It prints the value of each function, or the traceback. No model and no fleet is started.

    Exit status: 0 if there is a reward, 1 if there is none, 2 if a function cannot be imported.

    Example: paceline check-reward run.toml --row 17 --completion "The answer is 12"
    """
    from paceline.config.load import load_config
    from paceline.dataset.training_rows import open_training_rows
    from paceline.errors import BadInput
    from paceline_launcher.preflight.user_code import try_import

    settings = load_config(config, overrides or ())
    if completion is not None and completion.startswith("@"):
        completion = _text_of(Path(completion[1:]))
    if failure is not None:
        kept = json.loads(_text_of(failure))
        job = kept["job"] or {"shared": {"row": kept["row"]}, "each": {"completion": [""]}}
        values, number = job["shared"]["row"], kept["completion"] or 0
        completion = completion or job["each"]["completion"][number]
    else:
        rows = open_training_rows(settings.data).rows
        if not 0 <= row < len(rows):
            raise BadInput(f"--row {row}: the data has the rows 0 to {len(rows) - 1}")
        values = rows[row]
    field = settings.data.answer_field
    tried = try_import(
        "rollout_worker.check_rewards",
        "reward",
        config=settings.model_dump(mode="json"),
        row=values,
        completion=completion,
        answers=[("this row", values.get(field))] if field in values else [],
    )
    if tried.problem or tried.slow:
        raise BadInput(tried.problem or "it took too long")
    trial: dict[str, Any] = json.loads(tried.lines[-1])
    if as_json:
        print_json(trial)
    else:
        _print(trial, tried.lines[:-1])
    if trial["problem"]:
        raise typer.Exit(1)


def _print(trial: dict[str, Any], printed: tuple[str, ...]) -> None:
    for line in printed:
        typer.echo(line)
    for name, value in trial["values"].items():
        typer.echo(f"{value:>10g}  {name}")
    for doubt in trial["doubtful"]:
        typer.echo(f"note: {doubt}")
    if trial["trace"]:
        typer.echo(trial["trace"].rstrip())
    if trial["problem"]:
        typer.echo(f"no reward: {trial['problem']}")
    else:
        typer.echo(f"{trial['reward']:>10g}  the reward, weighted")


def _text_of(path: Path) -> str:
    from paceline.errors import BadInput

    try:
        return path.read_text()
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from None
