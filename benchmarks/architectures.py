"""Architectures of transformers in real runs: each a tiny random model under ``paceline up``.

    python -m benchmarks.architectures                                    all of both
    python -m benchmarks.architectures qwen3_next --arms transformers lora

A policy replica of two FSDP ranks trains it, an engine serves what they publish (every swap is read
back from the engine), the run is stopped at a checkpoint, continued, and exported; transformers
loads the export. Arms are the engines, adapters instead of all weights (of the attention in models
with experts), and bfloat16 with and without ``rollout.router_replay`` for those with experts. Rows
have the largest gap between log-probs of engine and trainer over tokens of age 0, or the reason for
which the run was refused. tests/ have the same models for packed rows and gradients against each
sequence alone. Rows are added to the result file; a repeated one replaces the old one.
"""

import re
import statistics
import subprocess
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks import runs
from examples.digit_sort.warm_start import build_tokenizer
from paceline.expert_routes import expert_layers
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
_BFLOAT16 = {"model.dtype": "bfloat16", "fleet.policy_ranks": 1}
ARMS: dict[str, dict[str, Any]] = {
    "transformers": {},
    "vllm": {"rollout.engine": "vllm"},
    "lora": {"model.lora.rank": 4},
    "bfloat16": _BFLOAT16,
    "replay": {**_BFLOAT16, "rollout.router_replay": True},
}
ROOT_CAUSE = re.compile(
    r"(?:\.py:\d+\] (?=\w+Error: )|not loaded: rank \d+: |do not fit model\.path: )(.+)"
)
VLLM_WIDTH = 4
"""Its attention on the CPU knows no head below 32."""
DELTA_RULE = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear", "olmo_hybrid")
DELTA_RULE_WIDTH = 16
"""vLLM has it for heads of 128 in bfloat16 on the CPU."""
REASON = re.compile(r"(?:error|cannot|refused|failed)[^\n]*", re.IGNORECASE)


def main() -> None:
    parser = runs.options("architectures", __doc__, "architectures")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(ARCHITECTURES))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS], help="default: all")
    args = parser.parse_args()
    if unknown := set(args.families) - set(ARCHITECTURES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    results = runs.Results(args.out, "family", "arm")
    for family in args.families or ARCHITECTURES:
        experts = bool(expert_layers(tiny_architecture(family)))
        for arm in args.arms:
            if experts or arm not in ("bfloat16", "replay"):
                results.add({"family": family, "arm": arm, **trained(family, arm)})


def trained(family: str, arm: str) -> dict[str, Any]:
    path = runs.SCRATCH / f"architecture-{family}"
    tokenizer = build_tokenizer()
    special = {"pad": tokenizer.pad_token_id, "eos": tokenizer.eos_token_id}
    half = arm == "vllm" and family in DELTA_RULE
    width = DELTA_RULE_WIDTH if half else VLLM_WIDTH if arm == "vllm" else 1
    model = tiny_architecture(family, vocabulary=len(tokenizer), width=width, **special)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    settings = {**runs.dotted(SETTINGS), "model.path": str(path), **ARMS[arm]}
    if arm == "lora" and expert_layers(model):
        settings["model.lora.targets"] = attention_layers(model)
    if half:
        settings["rollout.dtype"] = "bfloat16"
    name = f"architecture-{family}-{arm}"
    try:
        for steps, fresh in ((STEPS, True), (2 * STEPS, False)):
            given = {**settings, "train.steps": steps}
            fleet = runs.run_fleet(name, given, warm_up=1, timeout_s=300.0, fresh=fresh)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        found = REASON.findall(str(error)) + root_causes(runs.SCRATCH / name)
        return {"works": False, "why": found[-1] if found else str(error)[-300:]}
    rows = runs.metrics(fleet.run_dir, "step")
    measured: dict[str, Any] = {
        "works": True,
        "steps": fleet.steps,
        "samples_lost": fleet.summary["samples_lost"],
        "gap_max": max(row["logprob_gap_fresh_max"] for row in rows),
        "gap_mean": statistics.fmean(row["logprob_gap_fresh_mean"] for row in rows),
    }
    if half:
        measured["dtype"] = "bfloat16"
    if "route_agreement" in rows[-1]:
        measured["agreement"] = min(row["route_agreement"] for row in rows)
    export = Path(fleet.summary["export"])
    return measured if arm == "lora" else measured | {"moved": moved(path, export)}


def attention_layers(model: torch.nn.Module) -> list[str]:
    """Names of the linear layers of its attentions, for adapters: none fits fused experts."""
    paths = [path for path, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    return sorted({path.rpartition(".")[2] for path in paths if "attn" in path})


def root_causes(run_dir: Path) -> list[str]:
    """Errors of vLLM's own process in the logs of the rollout workers, which end without them."""
    logs = [path.read_text() for path in sorted(run_dir.glob("logs/rollout-*.log"))]
    return [line for text in logs for line in ROOT_CAUSE.findall(text)]


def moved(before: Path, after: Path) -> float:
    """Share of the parameters that training has changed."""
    old, new = (AutoModelForCausalLM.from_pretrained(p).state_dict() for p in (before, after))
    changed = sum(int((tensor != new[name]).sum()) for name, tensor in old.items())
    return float(changed / sum(tensor.numel() for tensor in old.values()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
