"""Paceline against TRL's GRPOTrainer: the demo's task, model and batch, each on the whole machine.

    pip install -c constraints.txt -e '.[bench]'
    python -m benchmarks.versus_trl                       both sizes, 100 steps
    python -m benchmarks.versus_trl --sizes 0.1M --steps 60 --repeats 3

Both start from the same warm-started weights and take the same number of optimizer steps of 32
prompts x 8 completions of at most 24 tokens, float32, AdamW, the same constant learning rate, no
KL. TRL runs in one process, at 1 and at 2 threads; the better counts. Paceline runs ``paceline up``
with one controller, one policy replica, one rollout worker and Redis, with a durable journal and
checkpoints. Both clocks run from the end of the last warm-up step to the end of the last step, so
neither pays for imports and start-up. Held-out reward is measured afterwards, greedy, by one piece
of code.

Paceline runs twice: with its defaults, and with ``train.loss.skip_zero_advantage = false``. By
default it skips samples whose gradient is exactly zero (groups of equal rewards, no KL); TRL
computes them. The two rows show this part of the ratio.
"""

import argparse
import json
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import runs

TARGETS = {"0.1M": 1.7, "0.8M": 1.5}
# At 0.8M, 3e-4 collapses the policy, in both systems alike.
LEARNING_RATES = {"0.1M": 3e-4, "0.8M": 1e-4}
GROUPS, GROUP_SIZE, MAX_TOKENS = 32, 8, 24
TRL_THREADS = (1, 2)
WARM_UP = 10
"""Steps before the clocks start."""
PACELINE: dict[str, dict[str, Any]] = {
    "Paceline": {},
    "Paceline, every sample computed": {"train.loss.skip_zero_advantage": False},
}


def main() -> None:
    parser = runs.options("versus_trl", __doc__, "peer")
    parser.add_argument("--sizes", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=1, help="medians over so many runs of each")
    args = parser.parse_args()
    result: dict[str, Any] = {"machine": runs.machine(), "steps": args.steps, "sizes": {}}
    for size in args.sizes:
        result["sizes"][size] = compare(size, args)
        runs.write(args.out, result)


def compare(size: str, args: argparse.Namespace) -> dict[str, Any]:
    model = runs.model_of(size)
    ways = {f"TRL, {n} threads": partial(trl, model, size, n) for n in TRL_THREADS}
    ways |= {name: partial(paceline, model, size, more) for name, more in PACELINE.items()}
    made: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    # In turns, so that a slow minute of the machine does not fall on one side only.
    for seed in range(args.repeats):
        for name, run in ways.items():
            made[name].append(run(seed, args))
            print(f"{size} {name}: {made[name][-1]['samples_per_s']:.0f} samples/s", flush=True)
    pace = {
        name: statistics.median(row["samples_per_s"] for row in rows) for name, rows in made.items()
    }
    best = max(rate for name, rate in pace.items() if name not in PACELINE)
    return {
        "held_out_before": runs.exact_match(model),
        "runs": made,
        "samples_per_s": pace,
        "ratios": {name: pace[name] / best for name in PACELINE},
        "target": TARGETS[size],
    }


def trl(
    model: Path, size: str, threads: int, seed: int, args: argparse.Namespace
) -> dict[str, Any]:
    out = runs.SCRATCH / f"trl-{size}"
    options: dict[str, Any] = {
        "--model": model,
        "--out": out,
        "--threads": threads,
        "--seed": seed,
        "--steps": args.steps,
        "--warm-up": WARM_UP,
        "--lr": LEARNING_RATES[size],
        "--groups": GROUPS,
        "--group-size": GROUP_SIZE,
        "--max-tokens": MAX_TOKENS,
    }
    command = [sys.executable, "-m", "benchmarks.versus_trl.trl_trainer"]
    command += [str(word) for option in options.items() for word in option]
    done = subprocess.run(command, cwd=runs.REPOSITORY, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    found["cpu_s_per_step"] = found["cpu_s"] / (args.steps - WARM_UP)
    found["held_out"] = runs.exact_match(out)
    return found


def paceline(
    model: Path, size: str, more: dict[str, Any], seed: int, args: argparse.Namespace
) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "run.seed": seed,
        "model.path": str(model),
        "data.eval_path": "none",
        "train.steps": args.steps,
        "train.groups_per_step": GROUPS,
        "train.optimizer.lr": LEARNING_RATES[size],
        "train.optimizer.schedule": "constant",
        "train.optimizer.warmup_steps": 0,
        "train.max_staleness": 2,
        "train.checkpoint_every": max(50, args.steps),
        "rollout.group_size": GROUP_SIZE,
        "rollout.max_tokens": MAX_TOKENS,
        "rollout.max_sequences": GROUPS * GROUP_SIZE,
        **more,
    }
    fleet = runs.run_fleet(f"peer-{size}{len(more)}", settings, warm_up=WARM_UP)
    return {
        "samples_per_s": fleet.samples_per_s,
        "cpu_s_per_step": sum(fleet.cpu_s_per_step.values()),
        "cpu_s_per_step_by_role": dict(fleet.cpu_s_per_step),
        "reward_first5": statistics.fmean(fleet.rewards[:5]),
        "reward_last5": statistics.fmean(fleet.rewards[-5:]),
        "held_out": runs.exact_match(Path(fleet.summary["export"])),
        "step_s": fleet.step_s,
        "means": dict(fleet.means),
        "samples_lost": fleet.summary["samples_lost"],
        "samples_duplicated": fleet.summary["samples_duplicated"],
        "groups_dropped": fleet.summary["groups_dropped"],
    }


if __name__ == "__main__":
    main()
