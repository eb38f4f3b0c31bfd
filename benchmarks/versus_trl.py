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

Paceline runs twice: with its defaults, and with ``train.loss.skip_zero_advantage = false``. By default
it skips samples whose gradient is exactly zero (groups of equal rewards, no KL); TRL computes them.
The two rows show this part of the ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks import runs

TARGETS = {"0.1M": 1.7, "0.8M": 1.5}
# At 0.8M, 3e-4 collapses the policy, in both systems alike.
LEARNING_RATES = {"0.1M": 3e-4, "0.8M": 1e-4}
GROUPS, GROUP_SIZE, MAX_TOKENS = 32, 8, 24
PACELINE: dict[str, dict[str, object]] = {
    "Paceline": {},
    "Paceline, every sample computed": {"train.loss.skip_zero_advantage": False},
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warm-up", type=int, default=10, help="steps before the clocks start")
    parser.add_argument("--repeats", type=int, default=1, help="medians over so many runs of each")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="tried for TRL")
    parser.add_argument("--lr", type=float, help="default: by size")
    parser.add_argument("--max-staleness", type=int, default=2, help="of Paceline; TRL has none")
    parser.add_argument("--set", action="append", default=[], help="further Paceline setting")
    parser.add_argument("--out", type=Path, help="JSON file; default: benchmarks/results/peer.json")
    args = parser.parse_args()

    result: dict[str, Any] = {"machine": runs.machine(), "steps": args.steps, "sizes": {}}
    rows = []
    for size in args.sizes:
        model = runs.model_of(size)
        before = runs.exact_match(model)
        tried: dict[str, list[dict[str, Any]]] = {f"TRL, {t} threads": [] for t in args.threads}
        tried |= {name: [] for name in PACELINE}
        # In turns, so that a slow minute of the machine does not fall on one side only.
        for repeat in range(args.repeats):
            for threads in args.threads:
                found = trl(model, size, threads, repeat, args)
                tried[f"TRL, {threads} threads"].append(found)
                say(size, f"TRL, {threads} threads", found)
            for name, settings in PACELINE.items():
                found = paceline(model, size, repeat, args, settings)
                tried[name].append(found)
                say(size, name, found)
        pace = {
            name: statistics.median(f["samples_per_s"] for f in all_)
            for name, all_ in tried.items()
        }
        best = max((name for name in pace if name not in PACELINE), key=lambda name: pace[name])
        ratios = {name: pace[name] / pace[best] for name in PACELINE}
        result["sizes"][size] = {
            "held_out_before": before,
            "runs": tried,
            "samples_per_s": pace,
            "ratios": ratios,
            "target": TARGETS[size],
        }
        for name in (best, *PACELINE):
            after = statistics.median(found["held_out"] for found in tried[name])
            rows.append(
                [
                    size,
                    name,
                    f"{pace[name]:.0f}",
                    f"{statistics.median(f['cpu_s_per_step'] for f in tried[name]):.3f}",
                    f"{before:.3f} -> {after:.3f}",
                    f"{ratios[name]:.2f} (target {TARGETS[size]})" if name in ratios else "1",
                ]
            )
    print(
        runs.table(
            ["size", "system", "samples/s", "CPU s/step", "held-out exact match", "ratio"], rows
        )
    )
    result["machine"]["load_at_end"] = round(os.getloadavg()[0], 2)
    print(runs.write("peer", result, args.out))
    return 0


def trl(
    model: Path, size: str, threads: int, seed: int, args: argparse.Namespace
) -> dict[str, Any]:
    out = runs.SCRATCH / f"trl-{size}"
    found = runs.child(
        "benchmarks.trl_trainer",
        *("--model", model, "--threads", threads, "--steps", args.steps),
        *("--warm-up", args.warm_up, "--groups", GROUPS, "--group-size", GROUP_SIZE),
        *(
            "--max-tokens",
            MAX_TOKENS,
            "--lr",
            args.lr or LEARNING_RATES[size],
            "--seed",
            seed,
            "--out",
            out,
        ),
    )
    found["cpu_s_per_step"] = found["cpu_s"] / (args.steps - args.warm_up)
    found["held_out"] = runs.exact_match(out)
    return found


def paceline(
    model: Path, size: str, seed: int, args: argparse.Namespace, extra: dict[str, object]
) -> dict[str, Any]:
    settings: dict[str, object] = {
        "run.seed": seed,
        "model.path": str(model),
        "data.eval_path": "none",
        "train.steps": args.steps,
        "train.groups_per_step": GROUPS,
        "train.optimizer.lr": args.lr or LEARNING_RATES[size],
        "train.optimizer.schedule": "constant",
        "train.optimizer.warmup_steps": 0,
        "train.max_staleness": args.max_staleness,
        "train.checkpoint_every": max(50, args.steps),
        "rollout.group_size": GROUP_SIZE,
        "rollout.max_tokens": MAX_TOKENS,
        "rollout.max_sequences": GROUPS * GROUP_SIZE,
        "fleet.controllers": 1,
        "fleet.policy": 1,
        "fleet.rollout": 1,
        **extra,
        **dict(item.split("=", 1) for item in args.set),
    }
    fleet = runs.run_fleet(f"peer-{size}{len(extra)}", settings, warm_up=args.warm_up)
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


def say(size: str, name: str, found: dict[str, Any]) -> None:
    print(
        f"{size} {name}: {found['samples_per_s']:.0f} samples/s, held-out {found['held_out']:.3f}",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
