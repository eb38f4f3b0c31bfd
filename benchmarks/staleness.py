"""Bias of asynchrony: accuracy by length of the answer, where long answers take longer.

    python -m benchmarks.staleness

Digit sort: a prompt with more digits is harder, and its answer longer. The reward waits in
proportion to the answer's length (``length_reward.py``), so that durations follow from the content.
The same fleet runs three times a seed, over the same number of samples:

    synchronous     max_staleness = 0: each step waits for its slowest group
    asynchronous    late groups are trained (train.late_groups = "train", the default)
    dropping        late groups are dropped, and others generated in their place

The exported models answer prompts that none was trained on, greedily; a third is a third of the
lengths.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import runs
from examples.digit_sort.make_data import draw_distinct

MODES = ("synchronous", "asynchronous", "dropping")
THIRDS = {"short": range(4, 7), "middle": range(7, 10), "long": range(10, 13)}
"""Digits of the prompt."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40, help="of each run, 256 samples each")
    parser.add_argument("--warm-up", type=int, default=10, help="steps left out of the rates")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-staleness", type=int, default=1, help="of the asynchronous modes")
    parser.add_argument("--token-s", type=float, default=0.1, help="wait for a token, in seconds")
    parser.add_argument("--prompts", type=int, default=1536, help="that the exported models answer")
    parser.add_argument("--set", action="append", default=[], help="further setting")
    parser.add_argument("--out", type=Path, help="JSON; default: benchmarks/results/staleness.json")
    args = parser.parse_args()
    os.environ["PACELINE_WAIT_TOKEN_S"] = str(args.token_s)
    prompts = unseen(args.prompts)
    before = accuracy(runs.model_of("0.1M"), prompts)
    result: dict[str, Any] = {
        "machine": runs.machine(),
        "steps": args.steps,
        "max_staleness": args.max_staleness,
        "token_s": args.token_s,
        "seeds": args.seeds,
        "prompts": args.prompts,
        "before": before,
        "runs": [],
    }
    for seed in range(args.seeds):
        for mode in MODES:
            result["runs"].append(measure(mode, seed, prompts, args))
            # A measurement that is cut short leaves what it has.
            written = runs.write(
                "staleness", {**result, "modes": summary(result["runs"])}, args.out
            )
    show(summary(result["runs"]), before)
    print(written)
    return 0


def measure(
    mode: str, seed: int, prompts: Sequence[Mapping[str, str]], args: argparse.Namespace
) -> dict[str, Any]:
    fleet = runs.run_fleet(
        f"staleness-{mode}-{seed}",
        {
            "run.seed": seed,
            "data.eval_path": "none",
            "reward.functions": ["benchmarks.length_reward:judge"],
            "reward.timeout_s": 120,
            "train.steps": args.steps,
            "train.checkpoint_every": 1000,
            "train.max_staleness": 0 if mode == "synchronous" else args.max_staleness,
            "train.late_groups": "drop" if mode == "dropping" else "train",
            "rollout.max_sequences": 256,
            "fleet.controllers": 1,
            "fleet.policy": 1,
            "fleet.rollout": 1,
            **dict(item.split("=", 1) for item in args.set),
        },
        warm_up=args.warm_up,
    )
    means = fleet.means
    found = {
        "mode": mode,
        "seed": seed,
        "samples_per_s": fleet.samples_per_s,
        "reward_last10": statistics.fmean(fleet.rewards[-10:]),
        "accuracy": accuracy(Path(fleet.summary["export"]), prompts),
        "groups_dropped": dict(fleet.summary["groups_dropped"]),
        "dropped": runs.dropped_share(fleet.summary),
        "response_tokens": means["response_tokens_mean"],
        "samples_lost": fleet.summary["samples_lost"],
        **{name: means.get(name, 0.0) for name in ("late_share", "masked_share", "ess")},
        "staleness_mean": means["staleness_mean"],
        "staleness_max": fleet.summary["max_staleness"],
    }
    print(f"{mode}, seed {seed}: {json.dumps(found)}", file=sys.stderr, flush=True)
    return found


def unseen(count: int) -> list[dict[str, str]]:
    """Prompts that are in no file of the demo, of every length equally many on average."""
    taken: set[str] = set()
    for name in ("train", "held_out"):
        lines = (runs.DEMO / f"{name}.jsonl").read_text().splitlines()
        taken |= {json.loads(line)["prompt"] for line in lines}
    return draw_distinct(random.Random(2025), count, taken)


def accuracy(model_dir: Path, prompts: Sequence[Mapping[str, str]]) -> dict[str, float]:
    """Share of right greedy answers: of all, and of each third of the lengths."""
    right = runs.right_answers(model_dir, prompts)
    of = {
        name: [r for r, row in zip(right, prompts, strict=True) if len(row["answer"]) in digits]
        for name, digits in THIRDS.items()
    }
    return {"all": statistics.fmean(right)} | {
        n: statistics.fmean(found) for n, found in of.items()
    }


def summary(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean over the seeds, and of each accuracy its lowest and highest seed."""
    modes = {}
    for mode in MODES:
        rows = [row for row in found if row["mode"] == mode]
        if not rows:
            continue
        numbers = [n for n, v in rows[0].items() if isinstance(v, float)]
        modes[mode] = {
            **{name: statistics.fmean(row[name] for row in rows) for name in numbers},
            "accuracy": {
                name: {
                    "mean": statistics.fmean(row["accuracy"][name] for row in rows),
                    "low": min(row["accuracy"][name] for row in rows),
                    "high": max(row["accuracy"][name] for row in rows),
                }
                for name in rows[0]["accuracy"]
            },
        }
    return modes


def show(modes: Mapping[str, Any], before: Mapping[str, float]) -> None:
    parts = ("all", *THIRDS)
    rows: list[list[object]] = [["before", *[f"{before[p]:.3f}" for p in parts], *[""] * 6]]
    for mode, found in modes.items():
        rows.append(
            [
                mode,
                *[f"{found['accuracy'][p]['mean']:.3f}" for p in parts],
                f"{found['reward_last10']:.3f}",
                f"{found['samples_per_s']:.0f}",
                f"{found['late_share']:.0%}",
                f"{found['masked_share']:.1%}",
                f"{found['dropped']:.0%}",
                f"{found['response_tokens']:.2f}",
            ]
        )
    head = ["", *parts, "training reward", "samples/s", "late", "masked", "dropped", "tokens"]
    print(runs.table(head, rows))


if __name__ == "__main__":
    sys.exit(main())
