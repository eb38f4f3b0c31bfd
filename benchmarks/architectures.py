"""Architectures of transformers in real runs: each a tiny random model under ``paceline up``.

    python -m benchmarks.architectures                       all, with both engines
    python -m benchmarks.architectures qwen3_next --engine transformers

A policy replica of two FSDP ranks trains it, an engine serves what they publish (every swap is read
back from the engine), the run is stopped at a checkpoint, continued, and exported; transformers
loads the export. Rows have the largest gap between log-probs of engine and trainer over tokens of
age 0, or the reason for which the run was refused. tests/ have the same models for packed rows and
gradients against each sequence alone. Rows are added to the result file; a repeated one replaces
the old one.
"""

import argparse
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks import runs
from examples.digit_sort.warm_start import build_tokenizer
from testbed.architectures import ARCHITECTURES, tiny_architecture

STEPS = 3
SETTINGS = {
    "model": {"dtype": "float32"},
    "data.eval_path": "none",
    "reward.functions": ["benchmarks.rewards:first_digit"],
    "train": {"groups_per_step": 4, "max_staleness": 0, "checkpoint_every": STEPS},
    "train.optimizer.warmup_steps": 0,
    "rollout": {"group_size": 4, "max_tokens": 8, "max_sequences": 16},
    "fleet.policy_ranks": 2,
}
REASON = re.compile(r"(?:error|cannot|refused|failed)[^\n]*", re.IGNORECASE)


def main() -> None:
    parser = runs.options("architectures", __doc__, "architectures")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(ARCHITECTURES))
    parser.add_argument("--engine", choices=("transformers", "vllm"), help="default: both")
    args = parser.parse_args()
    if unknown := set(args.families) - set(ARCHITECTURES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    results = runs.Results(args.out, "family", "engine")
    for family in args.families or ARCHITECTURES:
        for engine in [args.engine] if args.engine else ("transformers", "vllm"):
            results.add({"family": family, "engine": engine, **trained(args, family, engine)})


def trained(args: argparse.Namespace, family: str, engine: str) -> dict[str, Any]:
    path = runs.SCRATCH / f"architecture-{family}"
    tokenizer = build_tokenizer()
    special = {"pad": tokenizer.pad_token_id, "eos": tokenizer.eos_token_id}
    tiny_architecture(family, vocabulary=len(tokenizer), **special).save_pretrained(path)
    tokenizer.save_pretrained(path)
    settings = {**runs.dotted(SETTINGS), "model.path": str(path), "rollout.engine": engine}
    name = f"architecture-{family}-{engine}"
    try:
        for steps, fresh in ((STEPS, True), (2 * STEPS, False)):
            given = {**settings, "train.steps": steps}
            fleet = runs.run_fleet(name, given, warm_up=1, timeout_s=300.0, fresh=fresh)
    except RuntimeError as error:
        found = REASON.findall(str(error))
        return {"works": False, "why": found[-1] if found else str(error)[-300:]}
    AutoModelForCausalLM.from_pretrained(fleet.summary["export"])
    return {
        "works": True,
        "steps": fleet.steps,
        "samples_lost": fleet.summary["samples_lost"],
        "gap_max": max(row["logprob_gap_fresh_max"] for row in runs.metrics(fleet.run_dir, "step")),
        "moved": moved(path, Path(fleet.summary["export"])),
    }


def moved(before: Path, after: Path) -> float:
    """Share of the parameters that training has changed."""
    old, new = (AutoModelForCausalLM.from_pretrained(p).state_dict() for p in (before, after))
    changed = sum(int((tensor != new[name]).sum()) for name, tensor in old.items())
    return float(changed / sum(tensor.numel() for tensor in old.values()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
