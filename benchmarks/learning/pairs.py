"""Preference data of learning measurements: pairs of the demo model's own samples.

Each prompt has one right and one wrong answer; examples/rlhf/preferences.py draws them.
"""

import asyncio
import json
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from benchmarks import runs
from examples.digit_sort.make_data import draw_distinct
from examples.rlhf import preferences
from examples.rlhf.preferences import Row, of_the_demo, read_rows, write_rows

DATA = runs.SCRATCH / "flows-data"
HELD_OUT = 512
"""Prompts of the accuracy, and pairs of the accuracy over pairs."""
PAIRS, REWARD_PAIRS = 2048, 8000
"""Recorded pairs of the preference flows, and of a reward model."""


def unseen(count: int = HELD_OUT) -> list[Row]:
    """Prompts with their answers that nothing trains on, the same at every call."""
    return draw_distinct(random.Random("flows"), count, of_the_demo())


def recorded(seed: int, count: int) -> Path:
    """Directory of pairs.jsonl, held_out_pairs.jsonl and labels.jsonl, made if it is not there.

    The labels are the completions of the pairs one by one. No prompt is in a file of the demo.
    """
    directory = DATA / f"{'reward_pairs' if count == REWARD_PAIRS else 'pairs'}-{seed}"
    labels = directory / "labels.jsonl"
    if labels.is_file():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    taken = of_the_demo() | {row["prompt"] for row in unseen()}
    prompts = preferences.fresh_prompts(random.Random(f"pairs {seed}"), taken)
    model, wanted = runs.model_of("0.1M"), count + HELD_OUT
    rows, _ = asyncio.run(preferences.own_pairs(model, prompts, wanted, seed))
    write_rows(directory / "held_out_pairs.jsonl", rows[:HELD_OUT])
    write_rows(directory / "pairs.jsonl", rows[HELD_OUT:])
    write_rows(
        labels,
        [
            {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
            for row in rows[HELD_OUT:]
            for side in ("chosen", "rejected")
        ],
    )
    return directory


def accuracy(model: Path, rows: Sequence[Mapping[str, str]]) -> float:
    """Share of right greedy answers."""
    return statistics.fmean(runs.right_answers(model, rows))


def pair_accuracy(model_dir: Path, directory: Path) -> float:
    """Share of held-out pairs whose chosen completion scores higher; a tie is half right."""
    rows = read_rows(directory / "held_out_pairs.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="right")
    model = AutoModelForSequenceClassification.from_pretrained(model_dir).eval()

    def scores(side: str) -> torch.Tensor:
        texts = [row["prompt"] + row[side] + tokenizer.eos_token for row in rows]
        with torch.no_grad():
            batch = tokenizer(texts, return_tensors="pt", padding=True)
            logits: torch.Tensor = model(**batch).logits
        return logits[:, 0]

    chosen, rejected = scores("chosen"), scores("rejected")
    return float(((chosen > rejected).float() + 0.5 * (chosen == rejected).float()).mean())


def reward_model(seed: int, updates: int = 250) -> tuple[Path, dict[str, float]]:
    """Export of a reward model on recorded pairs, and its accuracy; trained once for each seed."""
    name = f"reward-model-{updates}-{seed}"
    about, export = runs.SCRATCH / f"{name}.json", runs.SCRATCH / name / "export"
    if not about.is_file():
        data = recorded(seed, REWARD_PAIRS)
        runs.run_fleet(
            name,
            {
                "run.seed": seed,
                "model.path": str(runs.model_of("0.1M")),
                "data": {"path": str(data / "pairs.jsonl"), "eval_path": "none"},
                "train": {"steps": updates, "checkpoint_every": updates},
            },
            warm_up=2,
            config=runs.REPOSITORY / "examples" / "rlhf" / "reward_model.toml",
        )
        about.write_text(
            json.dumps({"updates": updates, "pair_accuracy": pair_accuracy(export, data)})
        )
    return export, json.loads(about.read_text())
