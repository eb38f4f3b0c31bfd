"""``paceline eval``: its options, the configuration that they make, and its reports."""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.config.fields import CARRIED, Section
from paceline.config.load import ConfigError, changed_config, load_config, parse_setting
from paceline.config.model_files import has_adapters
from paceline.config.schema import Config
from paceline.config.sections.evaluation import EvalSetConfig, EvaluationConfig
from paceline.config.sections.objective_options import ObjectiveConfig
from paceline.config.sections.training import TrainConfig
from paceline.errors import BadInput, plural
from paceline.evaluation import row_metrics
from paceline.observe.checkpoints import META
from paceline.observe.run_files import finite
from paceline_launcher.cli.common import SetOption
from paceline_launcher.cli.models import find_checkpoint, refuse_scalar_head
from paceline_launcher.terminal import out_console, table

if TYPE_CHECKING:
    from paceline_launcher.cli.evaluate import Judged

RECORDED_FIELDS = [
    f"data.{name}_field"
    for name in ("messages", "completion", "chosen", "rejected", "margin", "label")
]
SET = "data"  # name of the set in the configuration
THREADS = "fleet.rollout_threads"
Positive = Annotated[int | None, typer.Option(min=1)]
Fraction = Annotated[float | None, typer.Option(min=1e-6, max=1)]
PROGRESS_S = 5.0  # between two lines about what is done


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The options. None: as in the run that the model comes from, or the default of the setting.
    Whatever else is asked for is a setting, such as --set rollout.max_tokens=4096.

    Args:
        data FILE: Data set, as data.path; default: data.eval_path of the run.
        k: Samples of each prompt. One is greedy, unless --temperature or --top-p is given.
        temperature: Sampling temperature; default: the run's, or 1.
        top_p: Nucleus sampling; default: the run's, or 1.
        reward NAME: Reward, may be repeated; default: the run's, or exact_match.
        limit: First prompts only, so many.
    """

    data: str | None = None
    k: Annotated[int, typer.Option(min=1, max=1024)] = 1
    temperature: Annotated[float | None, typer.Option(min=1e-6)] = None
    top_p: Fraction = None
    reward: list[str] | None = None
    limit: Positive = None
    overrides: SetOption = None


def settings(wanted: Wanted, base: Config | None, model: str) -> Config:
    """Raises BadInput that names the setting."""
    data = wanted.data or (base.data.eval_path if base is not None else None)
    if data is None:
        raise BadInput("--data is missing: give the file or data set to evaluate on")
    config = base or Config.model_validate({"model": {"path": model}, "data": {"path": data}})
    given = dict(parse_setting(text) for text in wanted.overrides or ())
    config = changed_config(config, given)
    evaluated = EvalSetConfig(
        path=data,
        name=config.data.name if data == config.data.eval_path else None,
        split=config.data.eval_split,
        samples=wanted.k,
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        limit=wanted.limit or CARRIED - 1,
    )
    # Nothing is trained, and what the run trained may have needed recorded rows.
    sections: dict[str, Section] = {"train": TrainConfig(), "objective": ObjectiveConfig()}
    sections["evaluation"] = EvaluationConfig(sets={SET: evaluated})
    own: dict[str, Any] = {
        **dict.fromkeys(RECORDED_FIELDS),
        "data.eval_path": None,
        "model.path": model,
        "model.lora": None,  # merged
        "reward.functions": wanted.reward or config.reward.functions,
        "rollout.on_update": "keep",  # no update comes, and only vLLM knows the others
        "rollout.source": "engine",
        "rollout.group_size": 2,
        # vLLM would wait for weights over a link.
        "rollout.vllm": config.rollout.vllm | {"load_format": "auto"},
        THREADS: given.get(THREADS, len(os.sched_getaffinity(0))),
    }
    if base is not None:
        own["model.tokenizer"] = None  # an export has the tokenizer of its checkpoint
    return changed_config(config.model_copy(update=sections), own)


def find_source(text: str) -> tuple[Path | None, Config | None]:
    """The checkpoint or adapters to export, or None for what can be loaded as it is, and the
    configuration of the run that the model comes from, if it is known. ``text``: a model's
    directory or hub name, an export, a checkpoint, or a run directory with its newest checkpoint.
    Raises BadInput."""
    from paceline.dataset.rows import could_be_hub_name

    path = Path(text).expanduser()
    if not path.exists() and could_be_hub_name(text):
        return None, None
    is_model = (path / "config.json").is_file() and not (
        (path / META).is_file() or has_adapters(path)
    )
    checkpoint = None if is_model else find_checkpoint(path)
    if is_model:
        refuse_scalar_head(path)
    elif checkpoint is None:
        raise BadInput(
            f"{text}: no such directory, or it is no model (it has no config.json), no checkpoint "
            f"(no {META}) and no run with a complete checkpoint. Give a model, an export, a "
            "checkpoint or a run"
        )
    # The run may have gone, or be of another release.
    config = None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, ConfigError):
        made_of = str(checkpoint)
        if is_model or has_adapters(path):
            made_of = json.loads((path / "paceline.json").read_text())["checkpoint"]
        beside = checkpoint in (None, path)
        run_dir = Path(made_of).absolute().parent.parent if beside else path
        config = load_config(run_dir / "config.toml")
    return checkpoint, config


def exported(checkpoint: Path, config: Config | None, out: Path, *, trust: bool) -> str:
    """``out``, with the model that an engine loads. Raises ExportError."""
    from policy_worker.checkpoint.export import export

    # Adapters name their base, by its absolute path.
    original = None if config is None or has_adapters(checkpoint) else config.model.path
    if original is not None and original.startswith(("/", ".")) and not Path(original).is_dir():
        original = None
    export(checkpoint, original, out, merge=True, trust_remote_code=trust)
    refuse_scalar_head(out)
    return str(out)


def result(source: str, checkpoint: Path | None, config: Config, outcome: Judged) -> dict[str, Any]:
    """Contents of the JSON file. ``standard_errors`` are those of the means over prompts."""
    eval_set, rollout = config.evaluation.sets[SET], config.rollout
    k, greedy = eval_set.samples, eval_set.is_greedy
    scores = dict(sorted(outcome.scores.items()))
    rows = list(scores.values())
    judged = {name: [*map(of_row, rows)] for name, of_row in row_metrics(k).items() if rows}
    metrics = {name: statistics.fmean(values) for name, values in judged.items()}
    for name in ("tokens", "truncated") if rows else ():
        metrics[name] = sum(getattr(row, name) for row in rows) / k / len(rows)
    tokens_per_s = sum(row.tokens for row in rows) / (outcome.generate_s or math.inf)
    return {
        "model": source,
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "data": eval_set.path,
        "prompts": outcome.rows,
        "scored": len(rows),
        "failed": dict(outcome.failed),
        "interrupted": outcome.interrupted,
        "samples": k,
        "greedy": greedy,
        "temperature": None if greedy else eval_set.temperature or rollout.temperature,
        "top_p": None if greedy else eval_set.top_p or rollout.top_p,
        "max_tokens": rollout.max_tokens,
        "seed": config.run.seed,
        "reward": config.reward.functions,
        "solved_at": eval_set.solved_at,
        "engine": rollout.engine,
        "metrics": metrics,
        "standard_errors": {
            name: statistics.stdev(values) / math.sqrt(len(rows))
            for name, values in judged.items()
            if len(rows) > 1
        },
        "generate_s": round(outcome.generate_s, 3),
        "tokens_per_s": tokens_per_s,
        "rows": [
            {"row": index, "reward": score.reward_mean, **asdict(score)}
            for index, score in scores.items()
        ],
    }


def print_table(found: dict[str, Any]) -> None:
    how = "greedy" if found["greedy"] else f"temperature {found['temperature']:g}"
    typer.echo(f"{found['scored']} prompts of {found['data']}, {found['samples']} x {how}")
    labels = {"tokens": "tokens per sample", "truncated": "truncated share"}
    errors = {name: f"{error:.4f}" for name, error in found["standard_errors"].items()}
    rows = [
        (labels.get(name, name), f"{value:.4f}", errors.get(name, ""))
        for name, value in found["metrics"].items()
    ]
    out_console().print(table("metric|>mean|>standard error", rows))


def evaluate(source: str, *, wanted: Wanted, json_out: Path | None = None) -> None:
    """Judge a model on a data set: mean reward, pass@1 to pass@k, maj@k, lengths and truncated
    share.

    No run and no controller is needed. A checkpoint is exported to a temporary directory, and
    judged with the prompts, rewards and limits of its run. Ctrl-C shows what is scored by then.

    Exit status: 0 done, 1 no prompt could be scored, 2 bad input, 130 interrupted.

    Example: paceline eval runs/demo/checkpoints/best --data held_out.jsonl --k 8 --json scores.json

    Example: paceline eval Qwen/Qwen3-0.6B --data math500.jsonl --reward math_verify --set
    data.chat=true

    Args:
        source MODEL|CHECKPOINT: Hugging Face directory or hub name, export, checkpoint, or run
            directory (its newest checkpoint).
        json_out --json OUT: JSON file to write.
    """
    from paceline.dataset.training_rows import load_rows_of

    if json_out is not None and not json_out.absolute().parent.is_dir():
        raise BadInput(f"--json: {json_out.absolute().parent}: no such directory")
    checkpoint, base = find_source(source)
    # Bad options and bad data are found before a checkpoint is exported.
    model = source if checkpoint else str(Path(source).expanduser())
    config = settings(wanted, base, model)
    eval_set = config.evaluation.sets[SET]
    fields = eval_set.data(config.data)
    rows = load_rows_of(eval_set.path, fields, name=eval_set.name, split=eval_set.split)
    next_at = 0.0

    def progress(outcome: Judged) -> None:
        nonlocal next_at
        if time.monotonic() < next_at and outcome.finished < outcome.rows:
            return
        next_at = time.monotonic() + PROGRESS_S
        rewards = [score.reward_mean for score in outcome.scores.values()]
        mean = statistics.fmean(rewards) if rewards else math.nan
        failed = f", {outcome.failed.total()} failed" if outcome.failed else ""
        line = f"{outcome.finished} of {plural(outcome.rows, 'prompt')}{failed}, reward {mean:.3f}"
        typer.echo(line, err=True)

    with tempfile.TemporaryDirectory(prefix="paceline-eval-") as directory:
        if checkpoint is not None:
            trust = config.model.trust_remote_code
            model = exported(checkpoint, base, Path(directory, "model"), trust=trust)
        from paceline_launcher.cli.evaluate import evaluate as judge

        outcome = judge(settings(wanted, base, model), rows, progress)
    report = result(source, checkpoint, config, outcome)
    if outcome.scores:
        print_table(report)
    if json_out is not None:
        json_out.write_text(json.dumps(finite(report), indent=2) + "\n")
    if outcome.failed:
        reasons = ", ".join(f"{reason} {count}" for reason, count in outcome.failed.items())
        failed = f"{plural(outcome.failed.total(), 'prompt')} ({reasons}); {outcome.example}"
        typer.echo(f"without a score: {failed}", err=True)
    if outcome.interrupted:
        done = f"{outcome.finished} of {plural(outcome.rows, 'prompt')}"
        typer.echo(f"interrupted after {done}: the means are over those scored", err=True)
    if outcome.interrupted or not outcome.scores:
        raise typer.Exit(130 if outcome.interrupted else 1)
