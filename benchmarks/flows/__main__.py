"""Training flows on the digit-sort demo: held-out accuracy before and after, and the reward model's
accuracy over pairs.

    python -m benchmarks.flows [FLOW ...] [--seeds 3]

Each flow is a run of ``paceline up`` with one policy replica on one thread; docs/algorithms.md has
the table. Preference data are the model's own samples (own_pairs.py). Accuracy is greedy, on 512
prompts that none was trained on, and is the mean over the last three checkpoints, because single
ones swing by 0.05 to 0.10. Results are added to benchmarks/results/flows.json as they come, so that
flows can be measured one after the other.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from benchmarks import runs
from benchmarks.flows import own_pairs
from benchmarks.flows.own_pairs import HELD_OUT
from benchmarks.flows.recipes import BATCH, PAIRS, RECIPES, REWARD_BATCH, REWARD_PAIRS, Recipe
from policy_worker.checkpoint.export import export

DATA = runs.SCRATCH / "flows-data"
LAST = 3
"""Checkpoints whose mean is the result."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "flows", nargs="*", metavar="FLOW", help=f"of {', '.join(RECIPES)}; default: all"
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON; default: benchmarks/results/flows.json")
    args = parser.parse_args()
    if unknown := [name for name in args.flows if name not in RECIPES]:
        parser.error(f"there is no flow {unknown[0]}: name some of {', '.join(RECIPES)}")
    held_out = own_pairs.unseen(HELD_OUT)
    result = runs.results_so_far("flows", args.out) or {
        "held_out": HELD_OUT,
        "before": accuracy(runs.model_of("0.1M"), held_out),
        "runs": [],
    }
    result["machine"] = runs.machine()
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for name in args.flows or RECIPES:
            measured = measure(name, RECIPES[name], seed, held_out)
            print(json.dumps(measured), file=sys.stderr, flush=True)
            same = (name, seed)
            kept = [r for r in result["runs"] if (r["flow"], r["seed"]) != same]
            result["runs"] = [*kept, measured]
            written = runs.write("flows", result, args.out)
    print(table(result))
    print(written)
    return 0


def measure(
    name: str, recipe: Recipe, seed: int, held_out: Sequence[Mapping[str, str]]
) -> dict[str, Any]:
    """One run of the product, and what its last checkpoints answer."""
    data = data_of(recipe, seed)
    begun = time.perf_counter()
    fleet = runs.run_fleet(
        f"flow-{name}-{seed}",
        {
            "run.seed": seed,
            "data.eval_path": "none",
            "reward.processes": 0,
            "train.optimizer.schedule": "constant",
            "train.optimizer.warmup_steps": 0,
            "train.steps": recipe.steps,
            "train.max_staleness": 1,
            "train.checkpoint_every": recipe.checkpoint_every,
            "train.keep_checkpoints": LAST,
            "fleet.controllers": 1,
            "fleet.policy": 1,
            "fleet.rollout": 1,
            **data,
            **recipe.settings,
        },
        warm_up=2,
    )
    found: dict[str, Any] = {
        "flow": name,
        "seed": seed,
        "seconds": time.perf_counter() - begun,
        "step_s": fleet.step_s,
        "samples": fleet.summary["samples_trained"],
        "ledger_ok": fleet.summary["ledger_ok"],
        **last_of(fleet.run_dir, ("pair_accuracy", "chosen_logprob_shift", "reward_margin")),
    }
    if recipe.data == "reward_pairs":
        rows = own_pairs.read_rows(directory_of(recipe, seed) / "held_out_pairs.jsonl")
        model = Path(fleet.summary["export"])
        return found | {"held_out_pair_accuracy": pair_accuracy(model, rows)}
    accuracies = [accuracy(model, held_out) for model in exports(fleet.run_dir)]
    return found | {"accuracies": accuracies, "accuracy": statistics.fmean(accuracies)}


def data_of(recipe: Recipe, seed: int) -> dict[str, Any]:
    """Settings of the data of a run; recorded pairs are made if they are not there."""
    if recipe.data == "sampled":
        return {"train.groups_per_step": BATCH}
    directory = directory_of(recipe, seed)
    large = recipe.data == "reward_pairs"
    count = REWARD_PAIRS if large else PAIRS
    own_pairs.write_pairs(directory, train=count, held_out=HELD_OUT, seed=seed)
    settings = {
        "rollout.source": "recorded",
        "data.path": str(directory / "pairs.jsonl"),
        "train.groups_per_step": REWARD_BATCH if large else BATCH,
    }
    match recipe.data:
        case "chosen":
            fields = {"data.completion_field": "chosen", "rollout.group_size": 1}
        case "labels":
            settings["train.groups_per_step"] = 2 * BATCH
            settings["data.path"] = str(own_pairs.write_labels(directory))
            fields = {
                "data.completion_field": "completion",
                "data.label_field": "label",
                "rollout.group_size": 1,
            }
        case _:
            fields = {
                "data.chosen_field": "chosen",
                "data.rejected_field": "rejected",
                "rollout.group_size": 2,
            }
    return settings | fields


def directory_of(recipe: Recipe, seed: int) -> Path:
    return DATA / f"{'reward_pairs' if recipe.data == 'reward_pairs' else 'pairs'}-{seed}"


def exports(run_dir: Path) -> list[Path]:
    """The run's last checkpoints as models, oldest first."""
    links = sorted(
        (p for p in (run_dir / "checkpoints").glob("step-*") if p.name[5:].isdigit()),
        key=lambda p: int(p.name[5:]),
    )
    return [export(link.resolve(), None, run_dir / "exports" / link.name) for link in links[-LAST:]]


def accuracy(model: Path, rows: Sequence[Mapping[str, str]]) -> float:
    return statistics.fmean(runs.right_answers(model, rows))


def pair_accuracy(model_dir: Path, rows: Sequence[Mapping[str, str]]) -> float:
    """Share of ``rows`` whose chosen completion gets the higher score, through transformers. A tie
    is half right."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="right")
    model = AutoModelForSequenceClassification.from_pretrained(model_dir).eval()

    def scores(side: str) -> torch.Tensor:
        texts = [row["prompt"] + row[side] + tokenizer.eos_token for row in rows]
        with torch.no_grad():
            found: torch.Tensor = model(
                **tokenizer(texts, return_tensors="pt", padding=True)
            ).logits
        return found[:, 0]

    chosen, rejected = scores("chosen"), scores("rejected")
    return float(((chosen > rejected).float() + 0.5 * (chosen == rejected).float()).mean())


def table(result: Mapping[str, Any]) -> str:
    """Of each flow the mean over its seeds, and each seed."""
    rows = [["before", "", f"{result['before']:.3f}", "", "", ""]]
    for name in RECIPES:
        found = [run for run in result["runs"] if run["flow"] == name]
        if not found:
            continue
        what = "accuracy" if "accuracy" in found[0] else "held_out_pair_accuracy"
        each = [run[what] for run in found]
        shift = [
            r["train_chosen_logprob_shift"] for r in found if "train_chosen_logprob_shift" in r
        ]
        rows.append(
            [
                name,
                "accuracy over pairs" if what != "accuracy" else "greedy accuracy",
                f"{statistics.fmean(each):.3f}",
                " ".join(f"{x:.3f}" for x in each),
                f"{statistics.fmean(shift):+.2f}" if shift else "",
                f"{statistics.fmean(r['seconds'] for r in found):.0f}",
            ]
        )
    head = ["flow", "measured", "mean", "seeds", "chosen shift, nats", "seconds"]
    return runs.table(head, rows)


def last_of(run_dir: Path, names: Sequence[str], count: int = 10) -> dict[str, float]:
    """Means of step metrics over the last steps that have them."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = sorted((r for r in rows if r["kind"] == "step"), key=lambda r: int(r["step"]))
    found = {}
    for name in names:
        if values := [row[name] for row in steps[-count:] if name in row]:
            found[f"train_{name}"] = statistics.fmean(values)
    return found


if __name__ == "__main__":
    sys.exit(main())
