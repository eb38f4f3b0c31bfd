"""PPO with four models (policy, critic, reference, reward model) against the same parts one after
the other in one process.

    python -m benchmarks.n_plus_n                     0.1M + 0.1M and 0.8M + 0.8M, 200 steps
    python -m benchmarks.n_plus_n --sizes 0.1M --steps 40

N + N: a policy of N parameters and a reward model of N; the reference and the critic are of N as
well. All start from the same warm-started weights, and from one reward model, trained on pairs of
the smaller warm-started model's own samples. A step is 16 prompts x 8 completions of at most 24
tokens, float32, AdamW, one update a sample, GAE with lambda 0.95, a KL to the reference in the
reward. TRL is not compared: 1.16.0 has no PPO trainer any more.

"in turn" is how the first RLHF systems did it (``in_turn.py``): plain torch and transformers in one
process, at 1 and at 2 threads, of which the faster counts. Ours is ``paceline up`` with a
controller, a policy replica (policy, critic, reference), a rollout worker, a scorer and Redis, one
thread each, on the same two cores; once as users run it and once with ``max_staleness = 0``, in
which nothing overlaps either. Clocks run from the end of the last warm-up step to the end of the
last step. Held-out exact match is measured afterwards, greedy, by one piece of code.
"""

import json
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import runs
from benchmarks.learning import pairs
from benchmarks.n_plus_n.in_turn import (
    CRITIC_LR_SCALE,
    GAE_LAMBDA,
    GROUP_SIZE,
    GROUPS,
    KL_COEF,
    MAX_TOKENS,
)

SIZES = ("0.1M", "0.8M")
LEARNING_RATES = {"0.1M": 1e-4, "0.8M": 3e-5}
THREADS = (1, 2)
WARM_UP = 10
"""Steps before the clocks start."""
LAST = 10
"""Steps whose mean is the training reward at the end."""
OURS: dict[str, dict[str, Any]] = {
    "Paceline": {"train.max_staleness": 2},
    "Paceline, synchronous": {"train.max_staleness": 0},
}
IN_TURN = "in turn, {} threads"


def main() -> None:
    parser = runs.options("n_plus_n", __doc__, "n_plus_n")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of each, in turns")
    systems = [*map(IN_TURN.format, THREADS), *OURS]
    parser.add_argument("--systems", nargs="+", choices=systems, default=systems)
    args = parser.parse_args()
    results = runs.Results(args.out, "size", "system", "seed")
    results.data["samples_per_step"] = GROUPS * GROUP_SIZE
    for size in args.sizes:
        model, scorer = runs.model_of(size), reward_model(size)
        results.data.setdefault("before", {})[size] = runs.exact_match(model)
        ways = {IN_TURN.format(n): partial(in_turn, n) for n in THREADS}
        ways |= {name: partial(paceline, more) for name, more in OURS.items()}
        # In turns, so that a slow minute of the machine does not fall on one side only.
        for seed in args.seeds:
            for name in args.systems:
                about = {"size": size, "system": name, "seed": seed, "steps": args.steps}
                about["machine"] = runs.machine()
                results.add(about | ways[name](size, model, scorer, seed, args.steps))


def reward_model(size: str) -> Path:
    """Export of a reward model of ``size`` on pairs of the smaller model's own samples, trained
    once and kept."""
    name = f"n-plus-n-reward-{size}"
    export = runs.SCRATCH / name / "export"
    if not (export / "config.json").is_file():
        recorded = pairs.recorded(0, pairs.REWARD_PAIRS)
        settings = {
            "model.path": str(runs.model_of(size)),
            "data": {"path": str(recorded / "pairs.jsonl"), "eval_path": "none"},
            "train": {"steps": 250, "checkpoint_every": 250},
        }
        config = runs.REPOSITORY / "examples" / "rlhf" / "reward_model.toml"
        runs.run_fleet(name, settings, warm_up=2, config=config)
    return export


def in_turn(
    threads: int, size: str, model: Path, scorer: Path, seed: int, steps: int
) -> dict[str, Any]:
    out = runs.SCRATCH / f"n-plus-n-in-turn-{size}"
    options: dict[str, Any] = {
        "--model": model,
        "--reward-model": scorer,
        "--out": out,
        "--threads": threads,
        "--seed": seed,
        "--steps": steps,
        "--warm-up": WARM_UP,
        "--lr": LEARNING_RATES[size],
    }
    command = [sys.executable, "-m", "benchmarks.n_plus_n.in_turn"]
    command += [str(word) for option in options.items() for word in option]
    done = subprocess.run(command, cwd=runs.REPOSITORY, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"in turn: exit status {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    rewards = found.pop("rewards")
    return {**found, **of_rewards(rewards), "held_out": runs.exact_match(out)}


def paceline(
    more: dict[str, Any], size: str, model: Path, scorer: Path, seed: int, steps: int
) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "run.seed": seed,
        "model.path": str(model),
        "data.eval_path": "none",
        "scorers.preference": {"kind": "reward_model", "path": str(scorer)},
        "reward.functions": ["scorer:preference"],
        "train": {
            "algorithm": "ppo",
            "steps": steps,
            "groups_per_step": GROUPS,
            "checkpoint_every": max(50, steps),
            "loss.kl_coef": KL_COEF,
            "optimizer": {
                "lr": LEARNING_RATES[size],
                "schedule": "constant",
                "warmup_steps": 0,
            },
        },
        "objective": {"critic_lr_scale": CRITIC_LR_SCALE, "gae_lambda": GAE_LAMBDA},
        "rollout": {
            "group_size": GROUP_SIZE,
            "max_tokens": MAX_TOKENS,
            "max_sequences": GROUPS * GROUP_SIZE,
        },
        "fleet.scorers": 1,
        **more,
    }
    fleet = runs.run_fleet(
        f"n-plus-n-{size}-{'-'.join(map(str, more.values()))}", settings, warm_up=WARM_UP
    )
    return {
        "samples_per_s": fleet.samples_per_s,
        "cpu_s_per_step": sum(fleet.cpu_s_per_step.values()),
        "cpu_s_per_step_by_part": dict(fleet.cpu_s_per_step),
        **of_rewards(list(fleet.rewards)),
        "held_out": runs.exact_match(Path(fleet.summary["export"])),
        "kl_last": fleet.means.get("kl"),
        "staleness_mean": fleet.means["staleness_mean"],
        "samples_lost": fleet.summary["samples_lost"],
        "samples_duplicated": fleet.summary["samples_duplicated"],
    }


def of_rewards(rewards: list[float]) -> dict[str, float]:
    """Scores of the reward model in training, at the beginning and after equal samples."""
    return {
        "reward_first": statistics.fmean(rewards[:LAST]),
        "reward_last": statistics.fmean(rewards[-LAST:]),
    }


if __name__ == "__main__":
    main()
