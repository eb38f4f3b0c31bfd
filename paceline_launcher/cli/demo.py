"""``paceline demo``: a whole run of the example digit sort, and what its model learned."""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path

import typer

import paceline_launcher
from paceline.config.load import load_config
from paceline.errors import BadInput, UserError
from paceline_launcher.cli.common import RunDirOption, SetOption
from paceline_launcher.cli.ledger import settings_of
from paceline_launcher.cli.up import up

CARRIED = Path(paceline_launcher.__file__).parent / "digit_sort"
EXAMPLE = Path("examples/digit_sort")
"""The folder that the example's configuration names, relative to where it is started."""
FILES = ("digit_sort.toml", "reward.py", "*.jsonl", "model-0.1M/*")
PROMPTS = 5
LEARNS_STEPS = 100
"""After so many steps the demo fails if the model has not learned."""


def demo(*, overrides: SetOption = None, run_dir: RunDirOption = None) -> None:
    """Train a tiny model to sort digits, with a whole fleet on this machine, in about two minutes.

    What it trains is copied to examples/digit_sort, unless it is there: a configuration, data, a
    reward and a model, to begin a run of your own from. An earlier run of the demo in the run
    directory is deleted first. At the end the exported model answers prompts that it was not
    trained on. Exit status 1 if it has not learned.

    Example: paceline demo --set train.steps=100
    """
    started = time.monotonic()
    copy_example()
    run_dir = run_dir or Path("runs/digit-sort")
    keep_others(run_dir, load_config(EXAMPLE / "digit_sort.toml", overrides or ()).run.name)
    try:
        up(EXAMPLE / "digit_sort.toml", overrides=overrides, run_dir=run_dir, fresh=True)
    except typer.Exit as ended:
        if ended.exit_code:
            raise
    summary = json.loads((run_dir / "summary.json").read_text())
    before, after = summary["eval_first"], summary["eval_last"]
    # One of which at most half was sampled with one version of the weights has no score.
    first, last = ("?" if score is None else f"{score:.0%}" for score in (before, after))
    typer.echo(
        f"\nThe model sorted {first} of the held-out digits before, and {last} after "
        f"{summary['steps']} steps ({time.monotonic() - started:.0f} s). "
        f"Samples lost {summary['samples_lost']}, trained twice {summary['samples_duplicated']}."
    )
    if not summary["export"]:
        raise UserError(f"the run exported no model: {summary['reason']}")
    typer.echo("The exported model, on prompts that it was not trained on:")
    right = ask(Path(summary["export"]))
    learned = right and (None in (before, after) or after > before)
    if summary["steps"] >= LEARNS_STEPS and not learned:
        raise UserError(f"the model has not learned: paceline why --run-dir {run_dir}")


def copy_example() -> None:
    """Copies the files of the example that the package carries to where its configuration says
    that they are. Files that are there stay."""
    for path in (path for pattern in FILES for path in CARRIED.glob(pattern)):
        copy = EXAMPLE / path.relative_to(CARRIED)
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def keep_others(run_dir: Path, name: str) -> None:
    """Raises BadInput if ``run_dir`` holds another run than ``name``."""
    if (run_dir / "config.toml").exists() and (found := settings_of(run_dir)[0]) != name:
        raise BadInput(f"--run-dir: {run_dir} holds the run {found!r}, which would be deleted")


def ask(model_dir: Path) -> int:
    """Reloads the exported model through transformers, prints its most likely answers to a few
    held-out prompts, and returns how many of them are right."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    rows = (EXAMPLE / "held_out.jsonl").read_text().splitlines()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    right = 0
    for row in map(json.loads, random.sample(rows, PROMPTS)):
        prompt = tokenizer(row["prompt"], return_tensors="pt")
        output = model.generate(**prompt, do_sample=False, max_new_tokens=24)
        start = prompt["input_ids"].shape[1]
        answer = tokenizer.decode(output[0, start:], skip_special_tokens=True)
        right += answer == row["answer"]
        verdict = "right" if answer == row["answer"] else f"wrong, it is {row['answer']}"
        typer.echo(f"  {row['prompt']} {answer}   {verdict}")
    return right
