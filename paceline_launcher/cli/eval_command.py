"""Reports of ``paceline eval``: progress, the table, and the JSON file."""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import BadInput
from paceline.evaluation import RowScore, SetScores, pass_at_k, reported_ks
from paceline.observe.json_lines import finite
from paceline_launcher.cli.common import with_options
from paceline_launcher.cli.eval_settings import Wanted

if TYPE_CHECKING:
    from paceline.config.schema import Config
    from paceline_launcher.cli.evaluate import Judged

_LABELS = {"tokens": "tokens per sample", "truncated": "truncated share"}
TERMINAL_S = 0.1
LOG_S = 10.0


class ProgressLine:
    """Progress on standard error; without a terminal, a line every 10 s or 10 %."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._terminal = sys.stderr.isatty()
        self._last = (0, clock())

    def __call__(self, outcome: Judged) -> None:
        tenth, now = 10 * outcome.finished // outcome.rows, self._clock()
        pause_s = TERMINAL_S if self._terminal else LOG_S
        if tenth == self._last[0] and now - self._last[1] < pause_s:
            return
        self._last = (tenth, now)
        scores = outcome.scores.values()
        mean = math.fsum(s.reward_mean for s in scores) / len(scores) if scores else math.nan
        failed = f", {outcome.failed.total()} failed" if outcome.failed else ""
        line = f"{outcome.finished} of {outcome.rows} prompts{failed}, reward {mean:.3f}"
        typer.echo(f"\r\x1b[K{line}" if self._terminal else line, err=True, nl=not self._terminal)

    def close(self) -> None:
        if self._terminal:
            typer.echo("\r\x1b[K", err=True, nl=False)


def result(source: str, checkpoint: Path | None, config: Config, outcome: Judged) -> dict[str, Any]:
    """Contents of the JSON file. ``standard_errors`` are those of the means over prompts."""
    from paceline_launcher.cli.eval_settings import SET

    eval_set = config.evaluation.sets[SET]
    ordered = [outcome.scores[index] for index in sorted(outcome.scores)]
    total = SetScores(samples=eval_set.samples)
    for row in ordered:
        total.add(row)
    metrics = {name: value for name, value in total.metrics().items() if name != "reward_se"}
    tokens = sum(row.tokens for row in ordered)
    return {
        "model": source,
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "data": eval_set.path,
        "prompts": outcome.rows,
        "scored": len(ordered),
        "failed": dict(outcome.failed),
        "interrupted": outcome.interrupted,
        "samples": eval_set.samples,
        "greedy": eval_set.is_greedy,
        "temperature": None
        if eval_set.is_greedy
        else eval_set.temperature or config.rollout.temperature,
        "top_p": None if eval_set.is_greedy else eval_set.top_p or config.rollout.top_p,
        "max_tokens": config.rollout.max_tokens,
        "seed": config.run.seed,
        "reward": config.reward.functions,
        "solved_at": eval_set.solved_at,
        "engine": config.rollout.engine,
        "metrics": metrics,
        "standard_errors": _standard_errors(ordered, eval_set.samples),
        "generate_s": round(outcome.generate_s, 3),
        "tokens_per_s": tokens / outcome.generate_s if outcome.generate_s else None,
        "rows": [
            {
                "row": index,
                "reward": score.reward_mean,
                "solved": score.solved,
                "majority": score.majority if eval_set.samples > 1 else None,
                "tokens": score.tokens,
                "truncated": score.truncated,
            }
            for index, score in sorted(outcome.scores.items())
        ],
    }


def _standard_errors(rows: list[RowScore], samples: int) -> dict[str, float]:
    columns: dict[str, Callable[[RowScore], float]] = {"reward": lambda row: row.reward_mean}
    for k in reported_ks(samples):
        columns[f"pass@{k}"] = lambda row, k=k: pass_at_k(row.samples, row.solved, k)  # type: ignore[misc]
    if samples > 1:
        columns[f"maj@{samples}"] = lambda row: row.majority
    if len(rows) < 2:
        return {}
    return {
        name: statistics.stdev(map(column, rows)) / math.sqrt(len(rows))
        for name, column in columns.items()
    }


def print_table(found: dict[str, Any], example: str) -> None:
    """``example``: what the first failed row says."""
    from rich.console import Console
    from rich.table import Table

    how = "greedy" if found["greedy"] else f"temperature {found['temperature']:g}"
    title = f"{found['scored']} prompts of {found['data']}, {found['samples']} x {how}"
    table = Table("metric", "mean", "standard error", title=title, title_justify="left")
    errors = found["standard_errors"]
    for name, value in found["metrics"].items():
        error = f"{errors[name]:.4f}" if name in errors else ""
        table.add_row(_LABELS.get(name, name), f"{value:.4f}", error)
    Console(soft_wrap=True).print(table)
    if found["failed"]:
        reasons = ", ".join(f"{reason} {count}" for reason, count in found["failed"].items())
        typer.echo(
            f"without a score: {sum(found['failed'].values())} prompts ({reasons}); {example}",
            err=True,
        )
    if found["interrupted"]:
        done = found["scored"] + sum(found["failed"].values())
        typer.echo(
            f"interrupted after {done} of {found['prompts']} prompts: the means are over those "
            "scored",
            err=True,
        )


def write_json(path: Path, found: dict[str, Any]) -> None:
    """Raises BadInput."""
    try:
        path.write_text(json.dumps(finite(found), indent=2) + "\n")
    except OSError as error:
        raise BadInput(f"--json: {path} cannot be written: {error.strerror}") from None


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
    from paceline_launcher.cli.eval_settings import SET, exported, find_source, settings

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
        from paceline_launcher.cli.eval_command import (
            ProgressLine,
            print_table,
            result,
            write_json,
        )
        from paceline_launcher.cli.evaluate import evaluate as judge

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
