"""Gain and cost of ``rollout.router_replay``: runs in bfloat16 with it and without.

    python -m benchmarks.router_replay [--seeds 3] [--steps 40]

A random Qwen3-MoE of four layers, each with 32 experts of which a token goes to four, in a fleet of
one controller, one policy replica and one rollout worker with the transformers engine. The arms
alternate, and every token that is trained is of age 0. Rows have the gap between log-probs of
engine and trainer, the share of the engine's choices of experts that the trainer would have made
itself, bytes of the payloads, and seconds a step. A repeated row replaces the old one.
"""

import os
import statistics
import threading
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks import runs
from examples.digit_sort.warm_start import build_tokenizer
from testbed.architectures import tiny_config

WARM_UP = 5
SETTINGS: dict[str, Any] = {
    "model": {"dtype": "bfloat16"},
    "data.eval_path": "none",
    "reward.functions": ["benchmarks.rewards:first_digit"],
    "train": {"groups_per_step": 8, "max_staleness": 0, "checkpoint_every": 1000},
    "train.optimizer": {"lr": 1e-4, "warmup_steps": 0},
    "train.loss.skip_zero_advantage": False,  # so that all tokens are counted
    "rollout": {"group_size": 8, "max_tokens": 64, "max_sequences": 64},
}


class PayloadSizes(threading.Thread):
    """Bytes of every payload in a directory, looked up until ``stop``: they do not stay."""

    def __init__(self, where: Path) -> None:
        super().__init__(daemon=True)
        self.sizes: dict[str, int] = {}
        self._where, self._stopped = where, threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(0.05):
            for home, _, names in os.walk(self._where):
                for path in (Path(home, name) for name in names if not name.startswith(".")):
                    if path.exists():
                        self.sizes[str(path)] = path.stat().st_size

    def stop(self) -> int:
        """Bytes of all payloads."""
        self._stopped.set()
        self.join()
        return sum(self.sizes.values())


def main() -> None:
    parser = runs.options("router_replay", __doc__, "router_replay")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    results = runs.Results(args.out, "replay", "seed")
    model = write_model(runs.SCRATCH / "router-replay-model")
    for seed in range(args.seeds):
        for replay in (False, True):
            row = {"replay": replay, "seed": seed}
            results.add(row | trained(model, replay=replay, seed=seed, steps=args.steps))


def write_model(path: Path) -> Path:
    tokenizer = build_tokenizer()
    special = {"pad": tokenizer.pad_token_id, "eos": tokenizer.eos_token_id}
    config = tiny_config("qwen3_moe", vocabulary=len(tokenizer), **special)
    config.update({"num_hidden_layers": 4, "num_experts": 32, "num_experts_per_tok": 4})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # as initialised, experts hardly change what they get
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def trained(model: Path, *, replay: bool, seed: int, steps: int) -> dict[str, Any]:
    name = f"router-replay-{'on' if replay else 'off'}"
    store = runs.SCRATCH / f"{name}-payloads-{seed}"
    given: dict[str, Any] = {"model.path": str(model), "payloads.url": f"file://{store}"}
    given |= {"run.seed": seed, "train.steps": steps, "rollout.router_replay": replay}
    payloads = PayloadSizes(store)
    payloads.start()
    fleet = runs.run_fleet(name, {**runs.dotted(SETTINGS), **given}, warm_up=WARM_UP)
    rows = runs.metrics(fleet.run_dir, "step")
    tokens = sum(row["tokens"] for row in rows)
    return {
        "steps": fleet.steps,
        "samples_lost": fleet.summary["samples_lost"],
        "gap_mean": statistics.fmean(row["logprob_gap_fresh_mean"] for row in rows),
        "gap_max": max(row["logprob_gap_fresh_max"] for row in rows),
        "agreement": statistics.fmean(row["route_agreement"] for row in rows) if replay else None,
        "payload_bytes_per_token": payloads.stop() / tokens,
        "step_s": fleet.step_s,
        "compute_s": fleet.means["time_compute_s"],
    }


if __name__ == "__main__":
    main()
