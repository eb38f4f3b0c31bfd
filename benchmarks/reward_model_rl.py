"""RL against a learned reward on digit sort: the true accuracy with a KL term and without one, and
when the run warns.

    python -m benchmarks.reward_model_rl [--seeds 0 1 2] [--arms grpo_kl grpo ppo_kl ppo]

For each seed: 8,000 pairs of the model's own samples, a reward model of 250 updates on them, and
runs of ``paceline up`` whose only reward is its score. The truth is the exact match on 512 prompts
that nothing is trained on; the result of a run is the mean of its last three evaluations. Results
are added to benchmarks/results/reward_model_rl.json as they come.
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

from benchmarks import runs
from benchmarks.flows import own_pairs
from benchmarks.flows.__main__ import pair_accuracy
from benchmarks.flows.own_pairs import HELD_OUT

NAME = "reward_model_rl"
PAIRS, UPDATES = 8000, 250
LAST = 3
"""Evaluations whose mean is the result."""
GRPO = {
    "train.groups_per_step": 32,
    "train.steps": 100,
    "train.optimizer.lr": 3e-4,
    "train.max_staleness": 1,
    "train.eval_every": 5,
    "train.checkpoint_every": 5,
}
PPO = {
    "train.algorithm": "ppo",
    "train.groups_per_step": 8,
    "train.steps": 400,
    "train.optimizer.lr": 1e-4,
    "train.max_staleness": 4,
    "train.eval_every": 20,
    "train.checkpoint_every": 20,
    "objective.critic_lr_scale": 10.0,
    "objective.gae_lambda": 0.95,
}
ARMS: dict[str, dict[str, Any]] = {
    "grpo_kl": {**GRPO, "train.loss.kl_coef": 0.3},
    "grpo": {**GRPO, "train.loss.kl_coef": 0.0},
    "ppo_kl": {**PPO, "train.loss.kl_coef": 0.3},
    "ppo": {**PPO, "train.loss.kl_coef": 0.0},
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help=f"JSON; default: benchmarks/results/{NAME}.json")
    args = parser.parse_args()
    result = runs.results_so_far(NAME, args.out) or {"reward_models": {}, "runs": []}
    result |= {"machine": runs.machine(), "held_out": HELD_OUT}
    for seed in args.seeds:
        model, about = reward_model(seed)
        result["reward_models"][str(seed)] = about
        for arm in args.arms:
            measured = measure(arm, seed, model)
            print(json.dumps(measured), file=sys.stderr, flush=True)
            kept = [r for r in result["runs"] if (r["arm"], r["seed"]) != (arm, seed)]
            result["runs"] = [*kept, measured]
            written = runs.write(NAME, result, args.out)
    print(written)
    return 0


def reward_model(seed: int) -> tuple[Path, dict[str, Any]]:
    """The export, and what is known of it. One that is there is used again."""
    data = runs.SCRATCH / "flows-data" / f"reward_pairs-{seed}"
    own_pairs.write_pairs(data, train=PAIRS, held_out=HELD_OUT, seed=seed)
    name = f"reward-model-{UPDATES}-{seed}"
    about = runs.SCRATCH / f"{name}.json"
    export = runs.SCRATCH / name / "export"
    if about.is_file():
        known: dict[str, Any] = json.loads(about.read_text())
        return export, known
    begun = time.perf_counter()
    runs.run_fleet(
        name,
        {
            "run.seed": seed,
            "model.path": str(runs.model_of("0.1M")),
            "data.path": str(data / "pairs.jsonl"),
            "data.eval_path": "none",
            "train.steps": UPDATES,
            "train.checkpoint_every": UPDATES,
        },
        warm_up=2,
        config=runs.REPOSITORY / "examples" / "rlhf" / "reward_model.toml",
    )
    seconds = time.perf_counter() - begun
    rows = own_pairs.read_rows(data / "held_out_pairs.jsonl")
    found = {
        "updates": UPDATES,
        "pair_accuracy": pair_accuracy(export, rows),
        "seconds": seconds,
    }
    about.write_text(json.dumps(found))
    return export, found


def measure(arm: str, seed: int, scorer: Path) -> dict[str, Any]:
    held_out = runs.SCRATCH / "flows-data" / "unseen.jsonl"
    own_pairs.write_rows(held_out, own_pairs.unseen(HELD_OUT))
    begun = time.perf_counter()
    fleet = runs.run_fleet(
        f"{NAME}-{arm}-{seed}",
        {
            "run.seed": seed,
            "data.eval_path": "none",
            "reward.functions": ["scorer:preference"],
            "reward.processes": 0,
            "scorers.preference.kind": "reward_model",
            "scorers.preference.path": str(scorer),
            "evaluation.sets.truth.path": str(held_out),
            "evaluation.sets.truth.reward": ["examples.digit_sort.reward:sorted_exactly"],
            "evaluation.sets.truth.limit": HELD_OUT,
            "train.optimizer.schedule": "constant",
            "train.optimizer.warmup_steps": 0,
            "fleet.controllers": 1,
            "fleet.policy": 1,
            "fleet.rollout": 1,
            **ARMS[arm],
        },
        warm_up=2,
    )
    rows = [json.loads(line) for line in (fleet.run_dir / "metrics.jsonl").read_text().splitlines()]
    curve = curve_of(rows)
    truths = [point["truth"] for point in curve]
    best = max(curve, key=lambda point: float(point["truth"]))
    return {
        "arm": arm,
        "seed": seed,
        "seconds": time.perf_counter() - begun,
        "samples": fleet.summary["samples_trained"],
        "ledger_ok": fleet.summary["ledger_ok"],
        "before": truths[0],
        "after": statistics.fmean(truths[-LAST:]),
        "best": best["truth"],
        "best_step": best["step"],
        "score_first": curve[1]["score"],
        "score_last": statistics.fmean(point["score"] for point in curve[-LAST:]),
        "kl_last": curve[-1]["kl"],
        "warned_at": warned_at(fleet.run_dir),
        "curve": curve,
    }


def curve_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each evaluation: step, true accuracy, and the means of score and KL over the steps since
    the one before. An evaluation has no accuracy if too few of its prompts were answered with one
    version of the weights; it is left out."""
    steps = sorted((r for r in rows if r["kind"] == "step"), key=lambda r: int(r["step"]))
    evals = sorted((r for r in rows if r["kind"] == "eval"), key=lambda r: int(r["step"]))
    curve, before = [], 0
    for one in evals:
        if one.get("eval_truth/reward") is None:
            continue
        between = [row for row in steps if before < row["step"] <= one["step"]]
        before = one["step"]
        means = {
            name: statistics.fmean(values) if (values := _column(between, metric)) else None
            for name, metric in (("score", "reward_mean"), ("kl", "kl"))
        }
        curve.append({"step": before, "truth": one["eval_truth/reward"], **means})
    return curve


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def warned_at(run_dir: Path) -> int | None:
    """Step of the evaluation after which the run said that its reward is probably exploited."""
    for line in (run_dir / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["type"] == "RewardHackingSuspected":
            return int(event["step"])
    return None


if __name__ == "__main__":
    sys.exit(main())
