"""On-policy distillation on digit sort: reverse KL to a teacher over the steps of a run.

    python -m benchmarks.distillation [--seeds 0 1 2]

The student is the demo's model. The teacher has the same size and was trained for longer, up to an
exact match of TEACHER_TARGET; it runs as a scorer of kind ``logprobs``. ``teacher_kl`` is the
student's reverse KL to it in nats a token, over the samples that a step trains. Results are added
to benchmarks/results/distillation.json as they come.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import runs

NAME = "distillation"
STEPS, WINDOW = 50, 5
"""Steps of a run, and those whose mean is a point of its curve."""
TEACHER_TARGET = 0.75
"""Exact match at which the training of the teacher stops."""
SETTINGS = {
    "train.algorithm": "distill",
    "objective.teacher": "teacher",
    "train.steps": STEPS,
    "train.groups_per_step": 32,
    "train.optimizer.lr": 3e-4,
    "train.optimizer.schedule": "constant",
    "train.optimizer.warmup_steps": 0,
    "train.max_staleness": 1,
    "train.eval_every": 25,
    "train.checkpoint_every": 25,
    "scorers.teacher.kind": "logprobs",
    "fleet.controllers": 1,
    "fleet.policy": 1,
    "fleet.rollout": 1,
    "fleet.scorers": 1,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help=f"JSON; default: benchmarks/results/{NAME}.json")
    args = parser.parse_args()
    teacher = teacher_model()
    result = runs.results_so_far(NAME, args.out) or {"runs": []}
    result |= {"machine": runs.machine(), "teacher_exact_match": runs.exact_match(teacher)}
    for seed in args.seeds:
        measured = measure(seed, teacher)
        print(json.dumps(measured), file=sys.stderr, flush=True)
        result["runs"] = [*(r for r in result["runs"] if r["seed"] != seed), measured]
        written = runs.write(NAME, result, args.out)
    print(written)
    return 0


def teacher_model() -> Path:
    """Trained once and kept in runs/bench."""
    path = runs.SCRATCH / f"model-teacher-{TEACHER_TARGET}"
    if not (path / "tokenizer.json").is_file():
        command = [sys.executable, "-m", "examples.digit_sort.warm_start"]
        command += ["--target", str(TEACHER_TARGET), "--out", str(path)]
        subprocess.run(command, cwd=runs.REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    return path


def measure(seed: int, teacher: Path) -> dict[str, Any]:
    begun = time.perf_counter()
    fleet = runs.run_fleet(
        f"{NAME}-{seed}",
        {**SETTINGS, "run.seed": seed, "scorers.teacher.path": str(teacher)},
        warm_up=2,
    )
    rows = [json.loads(line) for line in (fleet.run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = {int(row["step"]): float(row["teacher_kl"]) for row in rows if row["kind"] == "step"}
    kl = [steps[step] for step in sorted(steps)]
    return {
        "seed": seed,
        "seconds": time.perf_counter() - begun,
        "samples": fleet.summary["samples_trained"],
        "ledger_ok": fleet.summary["ledger_ok"],
        **change(kl),
        "teacher_kl": kl,
    }


def change(kl: Sequence[float]) -> dict[str, Any]:
    """First and last KL: means over WINDOW steps, since the KL is estimated from samples.
    ``halved_at``: the first step by which the mean over the last WINDOW steps was at most half the
    first; None if it never was."""
    first = statistics.fmean(kl[:WINDOW])
    means = ((n, statistics.fmean(kl[n - WINDOW : n])) for n in range(WINDOW, len(kl) + 1))
    halved = next((n for n, mean in means if mean <= first / 2), None)
    return {"first": first, "last": statistics.fmean(kl[-WINDOW:]), "halved_at": halved}


if __name__ == "__main__":
    sys.exit(main())
