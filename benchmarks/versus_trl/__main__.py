"""Paceline against TRL: the same task, model and batch, each system on the whole machine.

    pip install -c constraints.txt -e '.[bench]'
    python -m benchmarks.versus_trl                       both sizes, the demo's task, 100 steps
    python -m benchmarks.versus_trl --sizes 0.8M --workload long-tailed --steps 50
    python -m benchmarks.versus_trl --systems "Paceline" "TRL, 1 threads" --repeats 3

All start from the same warm-started weights and take the same number of optimizer steps of 32
prompts x 8 completions, float32, AdamW, the same constant learning rate, no KL. TRL's synchronous
GRPOTrainer runs in one process, with the generation of transformers and with vLLM in the process,
each at 1 and at 2 threads, of which the better counts. Its AsyncGRPOTrainer runs beside a vLLM
server, a thread each, with stand-ins for what needs a GPU in it (``async_trainer.py`` names them):
with Paceline's lag of 2, with its own default of 4, and with that and fewer samples in flight, so
that fewer grow too old. The fastest counts.
Paceline runs ``paceline up`` with one controller, one policy replica, one rollout worker and Redis,
with a durable journal and checkpoints. Clocks run from the end of the last warm-up step to the end
of the last step, so none pays for imports and start-up. Held-out reward is measured afterwards,
greedy, by one piece of code.

Paceline's default skips samples whose gradient is exactly zero (groups of equal rewards, no KL);
TRL computes them. "every sample computed" sets ``train.loss.skip_zero_advantage = false``.

The result file keeps the parts of other sizes and workloads; a part is measured again whole.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import runs
from benchmarks.versus_trl.workloads import WORKLOADS, Workload

TARGETS = {"0.1M": 1.7, "0.8M": 1.5}
# At 0.8M, 3e-4 collapses the policy, in both systems alike.
LEARNING_RATES = {"0.1M": 3e-4, "0.8M": 1e-4}
GROUPS, GROUP_SIZE = 32, 8
WARM_UP = 10
"""Steps before the clocks start."""
ALL_SAMPLES = {"train.loss.skip_zero_advantage": False}
VLLM = {"rollout.engine": "vllm", "rollout.dtype": "float32"}
PACELINE: dict[str, dict[str, Any]] = {
    "Paceline": {},
    "Paceline, every sample computed": ALL_SAMPLES,
    "Paceline on vLLM": VLLM,
    "Paceline on vLLM, every sample computed": {**VLLM, **ALL_SAMPLES},
}
TRL: dict[str, tuple[str, ...]] = {
    "TRL, 1 threads": ("trl_trainer", "--threads", "1"),
    "TRL, 2 threads": ("trl_trainer", "--threads", "2"),
    "TRL with vLLM, 1 threads": ("trl_trainer", "--threads", "1", "--engine", "vllm"),
    "TRL with vLLM, 2 threads": ("trl_trainer", "--threads", "2", "--engine", "vllm"),
    "TRL, asynchronous": ("async_trainer", "--threads", "1"),
    "TRL, asynchronous, its default lag of 4": ("async_trainer", "--threads", "1", "--lag", "4"),
    "TRL, asynchronous, that and one step in flight": (
        *("async_trainer", "--threads", "1", "--lag", "4"),
        *("--in-flight", str(GROUPS * GROUP_SIZE)),
    ),
}
PEERS = ("TRL, ", "TRL with vLLM, ", "TRL, asynchronous")
"""Beginnings of the names of a peer's rows; the first excludes the last."""
System = Callable[[Workload, str, int, argparse.Namespace], dict[str, Any]]


def main() -> None:
    parser = runs.options("versus_trl", __doc__, "peer")
    systems = [*TRL, *PACELINE]
    parser.add_argument("--sizes", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--workload", choices=list(WORKLOADS), default="demo")
    parser.add_argument("--systems", nargs="+", choices=systems, default=systems)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=1, help="medians over so many runs of each")
    args = parser.parse_args()
    result = json.loads(args.out.read_text()) if args.out.is_file() else {}
    result |= {"machine": runs.machine(), "steps": args.steps}
    part = "sizes" if args.workload == "demo" else args.workload.replace("-", "_")
    for size in args.sizes:
        result.setdefault(part, {})[size] = compare(size, args)
        runs.write(args.out, result)


def compare(size: str, args: argparse.Namespace) -> dict[str, Any]:
    machine = runs.machine()
    workload = WORKLOADS[args.workload](size)
    known: dict[str, System] = {name: partial(trl, name, words) for name, words in TRL.items()}
    known |= {name: partial(paceline, name, more) for name, more in PACELINE.items()}
    ways = {name: run for name, run in known.items() if name in args.systems}
    made: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    stopped: dict[str, str] = {}
    # In turns, so that a slow minute of the machine does not fall on one side only.
    for seed in range(args.repeats):
        for name, run in ways.items():
            try:
                made[name].append(run(workload, size, seed, args))
            except RuntimeError as error:
                stopped[name] = str(error)
                print(f"{size} {name}: {error}", flush=True)
                continue
            print(f"{size} {name}: {made[name][-1]['samples_per_s']:.0f} samples/s", flush=True)
    made = {name: rows for name, rows in made.items() if rows}
    pace = {
        name: statistics.median(row["samples_per_s"] for row in rows) for name, rows in made.items()
    }
    best = fastest(pace)
    ratios = {
        name: {peer: rate / pace[other] for peer, other in best.items()}
        for name, rate in pace.items()
        if name in PACELINE
    }
    return {
        "machine": machine,
        "steps": args.steps,
        "held_out_before": workload.accuracy(workload.model),
        "runs": made,
        "samples_per_s": pace,
        # To the synchronous trainer with the generation of transformers, as ever.
        "ratios": {name: found[PEERS[0]] for name, found in ratios.items() if PEERS[0] in found},
        "against": ratios,
        "best": best,
        "stopped": stopped,
        "target": TARGETS[size],
    }


def fastest(pace: Mapping[str, float]) -> dict[str, str]:
    """The faster row of each peer, by the beginning of its name."""
    found: dict[str, str] = {}
    for name in TRL:
        if name in pace:
            peer = max((one for one in PEERS if name.startswith(one)), key=len)
            found[peer] = max((found.get(peer, name), name), key=lambda row: pace[row])
    return found


def trl(
    name: str,
    words: tuple[str, ...],
    workload: Workload,
    size: str,
    seed: int,
    args: argparse.Namespace,
) -> dict[str, Any]:
    out = runs.SCRATCH / f"trl-{args.workload}-{size}"
    options: dict[str, Any] = {
        "--model": workload.model,
        "--data": workload.train,
        "--out": out,
        "--seed": seed,
        "--steps": args.steps,
        "--warm-up": WARM_UP,
        "--lr": LEARNING_RATES[size],
        "--groups": GROUPS,
        "--group-size": GROUP_SIZE,
        "--max-tokens": workload.max_tokens,
    }
    module, *fixed = words
    command = [sys.executable, "-m", f"benchmarks.versus_trl.{module}", *fixed]
    command += [str(word) for option in options.items() for word in option]
    done = subprocess.run(command, cwd=runs.REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: exit status {done.returncode}\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    found["cpu_s_per_step"] = found["cpu_s"] / (args.steps - WARM_UP)
    found["held_out"] = workload.accuracy(out)
    return found


def paceline(
    name: str,
    more: dict[str, Any],
    workload: Workload,
    size: str,
    seed: int,
    args: argparse.Namespace,
) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "run.seed": seed,
        "model.path": str(workload.model),
        "data.path": str(workload.train),
        "data.eval_path": "none",
        "data.max_prompt_tokens": workload.max_tokens,
        "train.steps": args.steps,
        "train.groups_per_step": GROUPS,
        "train.optimizer.lr": LEARNING_RATES[size],
        "train.optimizer.schedule": "constant",
        "train.optimizer.warmup_steps": 0,
        "train.max_staleness": 2,
        "train.checkpoint_every": max(50, args.steps),
        "rollout.group_size": GROUP_SIZE,
        "rollout.max_tokens": workload.max_tokens,
        "rollout.max_sequences": GROUPS * GROUP_SIZE,
        **more,
    }
    label = f"peer-{args.workload}-{size}-{list(PACELINE).index(name)}"
    fleet = runs.run_fleet(label, settings, warm_up=WARM_UP)
    return {
        "samples_per_s": fleet.samples_per_s,
        "cpu_s_per_step": sum(fleet.cpu_s_per_step.values()),
        "cpu_s_per_step_by_role": dict(fleet.cpu_s_per_step),
        "reward_first5": statistics.fmean(fleet.rewards[:5]),
        "reward_last5": statistics.fmean(fleet.rewards[-5:]),
        "held_out": workload.accuracy(Path(fleet.summary["export"])),
        "step_s": fleet.step_s,
        "means": dict(fleet.means),
        "samples_lost": fleet.summary["samples_lost"],
        "samples_duplicated": fleet.summary["samples_duplicated"],
        "groups_dropped": fleet.summary["groups_dropped"],
    }


if __name__ == "__main__":
    main()
