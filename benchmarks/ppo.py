"""PPO with a critic against GRPO: held-out accuracy of digit sort after the same number of samples.

    python -m benchmarks.ppo

Each run is a fleet of its own, with one policy replica and one rollout worker. A run's number is
the mean of its last three evaluations (greedy, 256 prompts that none was trained on): single
checkpoints swing by 0.05 to 0.10.

    grpo    100 steps of 32 prompts x 8 completions, lr 3e-4
    ppo     400 steps of 8 prompts x 8 completions, lr 1e-4: four updates where GRPO makes one, each from samples
            that are up to ``max_staleness`` updates old
    ppo-1   400 steps of 64 prompts x 1 completion: no group to compare with, the critic alone
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks import runs

SAMPLES = 25_600
LAST = 3
"""Evaluations whose mean is a run's number."""
ALGORITHMS: dict[str, dict[str, object]] = {
    "grpo": {"train.groups_per_step": 32, "train.optimizer.lr": 3e-4, "train.max_staleness": 1},
    "ppo": {
        "train.algorithm": "ppo",
        "train.groups_per_step": 8,
        "train.optimizer.lr": 1e-4,
        "train.max_staleness": 4,
        "objective.critic_lr_scale": 10.0,
        "objective.gae_lambda": 0.95,
    },
}
ALGORITHMS["ppo-1"] = {
    **ALGORITHMS["ppo"],
    "train.groups_per_step": 64,
    "rollout.group_size": 1,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--algorithms", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS)
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], help="further setting")
    parser.add_argument("--out", type=Path, help="JSON; default: benchmarks/results/ppo.json")
    args = parser.parse_args()
    result = runs.results_so_far("ppo", args.out)
    result |= {"machine": runs.machine(), "samples": SAMPLES}
    kept = [r for r in result.get("runs", []) if not _again(r, args)]
    result["runs"] = kept
    for seed in args.seeds:
        for algorithm in args.algorithms:
            result["runs"].append(measure(algorithm, seed, args))
            # A measurement that is cut short leaves what it has.
            result["mean"] = summary(result["runs"])
            written = runs.write("ppo", result, args.out)
    print(json.dumps(result["mean"], indent=1))
    print(written)
    return 0


def measure(algorithm: str, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    settings = ALGORITHMS[algorithm]
    group_size = int(str(settings.get("rollout.group_size", 8)))
    steps = SAMPLES // (group_size * int(str(settings["train.groups_per_step"])))
    fleet = runs.run_fleet(
        f"ppo-{algorithm}-{seed}",
        {
            "run.seed": seed,
            "train.steps": steps,
            "train.optimizer.schedule": "constant",
            "train.optimizer.warmup_steps": 0,
            "train.checkpoint_every": steps,
            "train.eval_every": steps // 10,
            "rollout.max_sequences": 256,
            "fleet.controllers": 1,
            "fleet.policy": 1,
            "fleet.rollout": 1,
            **settings,
            **dict(item.split("=", 1) for item in args.set),
        },
        warm_up=steps // 10,
        timeout_s=1800.0,
    )
    curve = evaluations(fleet.run_dir)
    found = {
        "algorithm": algorithm,
        "seed": seed,
        "curve": curve,
        "held_out": statistics.fmean(curve[-LAST:]),
        "step_s": fleet.step_s,
        "samples_per_s": fleet.samples_per_s,
        "explained_variance": fleet.means.get("explained_variance"),
        "staleness_mean": fleet.means["staleness_mean"],
        "samples_lost": fleet.summary["samples_lost"],
    }
    print(f"{algorithm}, seed {seed}: {json.dumps(found)}", file=sys.stderr, flush=True)
    return found


def evaluations(run_dir: Path) -> list[float]:
    """Held-out accuracy of each evaluation, in order; the first is that of the model it starts
    from."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "eval"]
    return [row["eval_reward_mean"] for row in sorted(rows, key=lambda row: row["step"])]


def summary(found: list[dict[str, Any]]) -> dict[str, float]:
    """Mean over the seeds by algorithm."""
    return {
        name: statistics.fmean(r["held_out"] for r in found if r["algorithm"] == name)
        for name in ALGORITHMS
        if any(r["algorithm"] == name for r in found)
    }


def _again(row: dict[str, Any], args: argparse.Namespace) -> bool:
    return row["algorithm"] in args.algorithms and row["seed"] in args.seeds


if __name__ == "__main__":
    sys.exit(main())
