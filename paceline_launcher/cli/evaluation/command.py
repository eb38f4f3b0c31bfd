"""``paceline eval``."""

from __future__ import annotations

import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import BadInput
from paceline_launcher.cli.common import SetOption


class EngineName(StrEnum):
    transformers = "transformers"
    vllm = "vllm"


class VoteRule(StrEnum):
    auto = "auto"
    text = "text"
    boxed = "boxed"
    number = "number"


def evaluate(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|CHECKPOINT",
            help="Hugging Face directory or hub name, export, checkpoint, or run directory (its newest checkpoint).",
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Data set, as data.path; default: data.eval_path of the run."
        ),
    ] = None,
    k: Annotated[int, typer.Option("--k", min=1, max=1024, help="Samples of each prompt.")] = 1,
    greedy: Annotated[
        bool,
        typer.Option("--greedy", help="Take the most likely token; the default for one sample."),
    ] = False,
    temperature: Annotated[
        float | None,
        typer.Option(min=1e-6, help="Sampling temperature; default: the run's, or 1."),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(min=1e-6, max=1, help="Nucleus sampling; default: the run's, or 1."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest completion; default: the run's, or 1024.")
    ] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Reward, may be repeated; default: the run's, or exact_match."
        ),
    ] = None,
    engine: Annotated[
        EngineName | None, typer.Option(help="Default: the run's, or transformers.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="First prompts only, so many.")] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", metavar="OUT", help="JSON file to write.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Split of a Hugging Face data set; default: test.")
    ] = None,
    prompt_field: Annotated[str | None, typer.Option(help="Field with the prompt.")] = None,
    answer_field: Annotated[str | None, typer.Option(help="Field with the answer.")] = None,
    solved_at: Annotated[
        float, typer.Option(help="Reward from which a sample counts as solved.")
    ] = 1.0,
    vote: Annotated[
        VoteRule, typer.Option(help="What the samples vote on in maj@k.")
    ] = VoteRule.auto,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the samples.")] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads of the engine; default: all.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
    overrides: SetOption = None,
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
    from paceline_launcher.cli.evaluation.settings import SET, Wanted, settings
    from paceline_launcher.cli.evaluation.source import exported, find_source

    if json_out is not None and not json_out.absolute().parent.is_dir():
        raise BadInput(f"--json: {json_out.absolute().parent}: no such directory")
    found = find_source(source)
    wanted = Wanted(
        data=data,
        k=k,
        greedy=greedy,
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_tokens,
        reward=reward or (),
        engine=engine,
        limit=limit,
        split=split,
        prompt_field=prompt_field,
        answer_field=answer_field,
        solved_at=solved_at,
        vote=vote,
        seed=seed,
        threads=threads,
        trust_remote_code=trust_remote_code,
        overrides=overrides or (),
    )
    # Bad options and bad data are found before a checkpoint is exported.
    config = settings(wanted, found.config, found.model)
    of = config.evaluation.sets[SET]
    from paceline.dataset.rows import check_rows, load_rows

    rows = load_rows(of.path, name=of.name, split=of.split)
    check_rows(rows, of.data(config.data))
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
