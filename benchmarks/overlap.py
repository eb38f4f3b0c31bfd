"""Gain from asynchrony: the same processes at ``max_staleness`` 0 (synchronous) and 4.

    python -m benchmarks.overlap

(a) As is: the demo's step, one policy replica and one rollout worker of one thread each. The ideal
    is the slower of generation alone and training alone, measured in the same run on one thread
    each. The learning rate is nearly 0, so that every mode does the same work at every step.
(b) With a reward that waits (log-normal, ``waiting_reward.py``), as a sandbox or a judge does, at
    the demo's learning rate: samples/s, and the reward after the same number of samples. The waits
    do not depend on what is answered; ``benchmarks.staleness`` has waits that do. Also with late
    groups dropped (train.late_groups = "drop"), for comparison.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks import runs

SYNCHRONOUS, ASYNCHRONOUS = 0, 4
DROPPING = "4, late groups dropped"
TARGET = 2.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=["a", "b"],
        default=["a", "b"],
        help="the others keep their results",
    )
    parser.add_argument("--steps", type=int, default=120, help="of each run of part (a)")
    parser.add_argument("--waiting-steps", type=int, default=60, help="of each run of part (b)")
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--median-s", type=float, default=0.1, help="of one reward's wait")
    parser.add_argument("--sigma", type=float, default=1.0, help="shape of the log-normal wait")
    parser.add_argument("--size", choices=["0.1M", "0.8M"], default="0.1M")
    parser.add_argument("--set", action="append", default=[], help="further setting")
    parser.add_argument("--out", type=Path, help="JSON; default: benchmarks/results/overlap.json")
    args = parser.parse_args()
    os.environ["PACELINE_WAIT_MEDIAN_S"] = str(args.median_s)
    os.environ["PACELINE_WAIT_SIGMA"] = str(args.sigma)

    result = runs.results_so_far("overlap", args.out)
    machine = runs.machine()
    if "a" in args.parts:
        result["as_is"] = {"machine": machine, "size": args.size, **as_is(args)}
    if "b" in args.parts:
        result["waiting"] = {"machine": machine, "size": args.size, **waiting(args)}
    print(runs.write("overlap", result, args.out))
    return 0


def common(args: argparse.Namespace) -> dict[str, object]:
    return {
        "model.path": str(runs.model_of(args.size)),
        "data.eval_path": "none",
        "train.optimizer.schedule": "constant",
        "train.optimizer.warmup_steps": 0,
        "train.checkpoint_every": 1000,
        "rollout.max_sequences": 256,
        "fleet.controllers": 1,
        "fleet.policy": 1,
        "fleet.rollout": 1,
        **dict(item.split("=", 1) for item in args.set),
    }


def as_is(args: argparse.Namespace) -> dict[str, Any]:
    settings = {**common(args), "train.optimizer.lr": 1e-9, "train.steps": args.steps}
    batches = runs.SCRATCH / "overlap-batches.bin"
    batches.parent.mkdir(parents=True, exist_ok=True)
    alone = {}
    for half in ("generate", "train"):
        options = [part for k, v in settings.items() for part in ("--set", f"{k}={v}")]
        alone[half] = runs.child(
            "benchmarks.isolated_halves",
            *(half, "--config", runs.DEMO / "digit_sort.toml", "--batches", batches, *options),
        )
    ideal = min(half["samples_per_s"] for half in alone.values())
    serial = 1 / sum(1 / half["samples_per_s"] for half in alone.values())
    modes = {}
    for staleness in (SYNCHRONOUS, ASYNCHRONOUS):
        modes[staleness] = measure(f"overlap-a{staleness}", settings, staleness, args)
    print("(a) as is")
    rows: list[list[object]] = [
        ["generation alone", f"{alone['generate']['samples_per_s']:.0f}", "", "", ""],
        ["training alone", f"{alone['train']['samples_per_s']:.0f}", "", "", ""],
        ["one after the other, nothing else", f"{serial:.0f}", f"{serial / ideal:.2f}", "", ""],
    ]
    for staleness, found in modes.items():
        rows.append(
            [
                f"max_staleness = {staleness}",
                f"{found['samples_per_s']:.0f}",
                f"{found['samples_per_s'] / ideal:.2f}",
                split(found),
                cpu(found),
            ]
        )
    header = ["", "samples/s", "of the ideal", "trainer, ms a step", "CPU, ms a step"]
    print(runs.table(header, rows))
    gain = modes[ASYNCHRONOUS]["samples_per_s"] / modes[SYNCHRONOUS]["samples_per_s"]
    print(
        f"asynchronous / synchronous: {gain:.2f} (perfect overlap of the halves: {ideal / serial:.2f})"
    )
    print(
        "This gain is the overlap of computing alone: while one core trains, the other generates."
        " It can be no larger than the shorter half lets it be.\n"
    )
    return {"alone": alone, "ideal": ideal, "serial": serial, "modes": modes, "gain": gain}


def waiting(args: argparse.Namespace) -> dict[str, Any]:
    settings = {
        **common(args),
        "train.steps": args.waiting_steps,
        "reward.functions": ["benchmarks.waiting_reward:judge"],
        "reward.timeout_s": 120,
    }
    modes = {}
    for staleness in (SYNCHRONOUS, ASYNCHRONOUS):
        modes[str(staleness)] = measure(f"overlap-b{staleness}", settings, staleness, args)
    drop = {**settings, "train.late_groups": "drop"}
    modes[DROPPING] = measure("overlap-b-drop", drop, ASYNCHRONOUS, args)
    gain = modes[str(ASYNCHRONOUS)]["samples_per_s"] / modes[str(SYNCHRONOUS)]["samples_per_s"]
    print(f"(b) a reward that waits: log-normal, median {args.median_s:g} s, sigma {args.sigma:g}")
    rows = [
        [
            f"max_staleness = {staleness}",
            f"{found['samples_per_s']:.0f}",
            f"{1000 * found['step_s']:.0f}",
            f"{found['reward_first5']:.3f} -> {found['reward_last10']:.3f}",
            f"{found['held_out']:.3f}",
            f"{found['means']['late_share']:.0%}",
            f"{found['means']['masked_share']:.1%}",
            f"{found['dropped_share']:.0%}",
        ]
        for staleness, found in modes.items()
    ]
    header = ["", "samples/s", "ms a step", "training reward", "held-out"]
    header += ["late groups", "masked tokens", "dropped groups"]
    print(runs.table(header, rows))
    slow = slowest_of(args)
    print(f"asynchronous / synchronous: {gain:.2f} (target {TARGET})")
    print(
        f"Both train every group that they generate. Hardly any of this gain is overlap of computing,"
        f" which (a) measures. A synchronous step waits for the slowest of its 256 answers, {slow:.2f} s"
        f" on average; an asynchronous one takes the groups that are there, and late ones are in a later"
        f" step.\n"
    )
    return {
        "median_s": args.median_s,
        "sigma": args.sigma,
        "modes": modes,
        "gain": gain,
        "target": TARGET,
    }


def slowest_of(args: argparse.Namespace) -> float:
    """Mean of the longest of 256 log-normal waits, in seconds, by drawing."""
    draw = random.Random(0)
    batches = [
        max(draw.lognormvariate(math.log(args.median_s), args.sigma) for _ in range(256))
        for _ in range(400)
    ]
    return statistics.fmean(batches)


def measure(
    name: str, settings: dict[str, object], staleness: int, args: argparse.Namespace
) -> dict[str, Any]:
    fleet = runs.run_fleet(
        name, {**settings, "train.max_staleness": staleness}, warm_up=args.warm_up
    )
    print(
        f"{name}: {fleet.samples_per_s:.0f} samples/s, {1000 * fleet.step_s:.0f} ms a step",
        file=sys.stderr,
        flush=True,
    )
    return {
        "samples_per_s": fleet.samples_per_s,
        "step_s": fleet.step_s,
        "cpu_s_per_step": dict(fleet.cpu_s_per_step),
        "means": dict(fleet.means),
        "reward_first5": statistics.fmean(fleet.rewards[:5]),
        "reward_last10": statistics.fmean(fleet.rewards[-10:]),
        "held_out": runs.exact_match(Path(fleet.summary["export"])),
        "groups_dropped": fleet.summary["groups_dropped"],
        "dropped_share": runs.dropped_share(fleet.summary),
        "samples_lost": fleet.summary["samples_lost"],
    }


def split(found: dict[str, Any]) -> str:
    """The trainer's time: waiting for groups, computing, and the rest."""
    means = found["means"]
    names = ("wait", "compute", "reduce", "commit", "publish")
    return ", ".join(f"{n} {1000 * means.get(f'time_{n}_s', 0.0):.0f}" for n in names)


def cpu(found: dict[str, Any]) -> str:
    used = sorted(found["cpu_s_per_step"].items(), key=lambda item: -item[1])
    return ", ".join(f"{role} {1000 * seconds:.0f}" for role, seconds in used)


if __name__ == "__main__":
    sys.exit(main())
