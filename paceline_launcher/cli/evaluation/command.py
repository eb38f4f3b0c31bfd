"""``paceline eval``."""

import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import BadInput
from paceline_launcher.cli.common import with_options
from paceline_launcher.cli.evaluation.settings import Wanted


@partial(with_options, name="wanted", kind=Wanted)
def evaluate(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|CHECKPOINT",
            help="Hugging Face directory or hub name, export, checkpoint, or run directory (its "
            "newest checkpoint).",
        ),
    ],
    wanted: Wanted,
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="JSON file to write.")
    ] = None,
) -> None:
    """Judge a model on a data set: mean reward, pass@1 to pass@k, maj@k, lengths and truncated
    share.

    No run and no controller is needed. A checkpoint is exported to a temporary directory, and
    judged with the prompts, rewards and limits of its run. Ctrl-C shows what is scored by then.

    Exit status: 0 done, 1 no prompt could be scored, 2 bad input, 130 interrupted.

    Example: paceline eval runs/demo/checkpoints/best --data held_out.jsonl --k 8 --json scores.json

    Example: paceline eval Qwen/Qwen3-0.6B --data math500.jsonl --reward math_verify --set
    data.chat=true
    """
    from paceline_launcher.cli.evaluation.settings import SET, settings
    from paceline_launcher.cli.evaluation.source import exported, find_source

    if json_out is not None and not json_out.absolute().parent.is_dir():
        raise BadInput(f"--json: {json_out.absolute().parent}: no such directory")
    found = find_source(source)
    # Bad options and bad data are found before a checkpoint is exported.
    config = settings(wanted, found.config, found.model)
    eval_set = config.evaluation.sets[SET]
    from paceline.dataset.rows import check_rows, load_rows

    rows = load_rows(eval_set.path, name=eval_set.name, split=eval_set.split)
    check_rows(rows, eval_set.data(config.data))
    with tempfile.TemporaryDirectory(prefix="paceline-eval-") as directory:
        trusted = config.model.trust_remote_code
        model = exported(found, Path(directory), trust_remote_code=trusted)
        config = settings(wanted, found.config, model)
        from paceline_launcher.cli.evaluation.evaluate import evaluate as judge
        from paceline_launcher.cli.evaluation.report import (
            ProgressLine,
            print_table,
            result,
            write_json,
        )

        progress = ProgressLine()
        try:
            outcome = judge(config, rows, progress)
        finally:
            progress.close()
    report = result(source, found.checkpoint, config, outcome)
    if outcome.scores:
        print_table(report, outcome.example)
    if json_out is not None:
        write_json(json_out, report)
    if outcome.interrupted:
        if not outcome.scores:
            typer.echo(f"interrupted before any of {outcome.rows} prompts was scored", err=True)
        raise typer.Exit(130)
    if not outcome.scores:
        typer.echo(f"no prompt could be scored: {outcome.example}", err=True)
        raise typer.Exit(1)
