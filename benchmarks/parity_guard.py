"""Cost of the parity guard: tokens per CPU second with a swap before every batch, checked and
unchecked.

    python -m benchmarks.parity_guard [--rounds 40] [--json FILE]

The batch is that of ``benchmarks.engine``: 256 sequences of at most 24 tokens, one thread, float32.
A run of the demo swaps weights about as often; longer completions make the share of the check
smaller. Two engines of one process take turns, with ``rollout.verify`` on and off; ``ratio`` is the
median of their tokens per CPU second, round by round. The checks are timed alone as well: the
sampled one, which most swaps have, and the complete one, which every ``rollout.verify_every``-th
has.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.engine import (
    DEMO,
    ROOT,
    SLOTS,
    by_engine,
    config_for,
    make_larger_model,
    prompts_of,
)
from paceline.prompt_tokenizer import PromptTokenizer
from rollout_worker.engine import make_engine
from rollout_worker.engine.parameter_parity import ParameterPart, differing


async def measure(model_path: Path, rounds: int) -> dict[str, Any]:
    config = config_for(model_path, SLOTS[0])
    tokenizer = PromptTokenizer(config)
    prompts = prompts_of(tokenizer)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    rates: dict[bool, list[float]] = {True: [], False: []}
    ways = {}
    for verified in rates:
        rollout = config.rollout.model_copy(update={"verify": verified})
        engine = make_engine(config.model_copy(update={"rollout": rollout}), tokenizer)
        await engine.start()
        ways[verified] = engine, by_engine(engine, prompts)
    for number in range(-2, rounds):
        # Each goes first as often as the other.
        for verified in (True, False) if number % 2 else (False, True):
            engine, batch = ways[verified]
            begun = time.process_time()
            await engine.load_weights(number + 3, weights)
            tokens = await batch(number + 100)
            if number >= 0:
                rates[verified].append(tokens / (time.process_time() - begun))
    for engine, _ in ways.values():
        await engine.close()
    parts = [ParameterPart(name, tensor.clone(), tensor) for name, tensor in weights.items()]
    return {
        "parameters": sum(p.numel() for p in weights.values()),
        "weights": len(weights),
        "tokens_per_s": {"checked": median(rates[True]), "unchecked": median(rates[False])},
        "ratio": median(a / b for a, b in zip(rates[True], rates[False], strict=True)),
        "sampled_ms": check_ms(parts, complete=False),
        "complete_ms": check_ms(parts, complete=True),
        "batch_ms": 1e3 * mean(tokens / rate for rate in rates[False]),
    }


def check_ms(parts: list[ParameterPart], *, complete: bool) -> float:
    spent = []
    for _ in range(30):
        begun = time.process_time()
        assert not differing(parts, complete=complete)
        spent.append(time.process_time() - begun)
    return 1e3 * median(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/parity_guard.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {"rounds": options.rounds, "clock": "CPU seconds of the process"}
    with tempfile.TemporaryDirectory() as directory:
        models = {"0.1 M": DEMO / "model-0.1M"}
        for size in ("0.8 M", "6 M"):
            models[size] = make_larger_model(Path(directory, size), size)
        for name, path in models.items():
            results[name] = asyncio.run(measure(path, options.rounds))
            print(name, json.dumps(results[name]))
    options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
