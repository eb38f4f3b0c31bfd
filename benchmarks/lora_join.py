"""Time until a rollout worker that joins a run of adapters (LoRA) can generate, against the same
engine's load of the base alone.

    python -m benchmarks.lora_join [--repeats 5]

On one core, the two in turn: the engine is started, which checks its decoder against the model's
own forward; with adapters it is ready once the first ones are loaded and verified. The model is as
deep and wide as Qwen3-0.6B, with its vocabulary and random weights.
"""

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import runs
from paceline.config.load import load_config
from paceline.prompt_tokenizer import PromptTokenizer
from rollout_worker.engine.transformers.engine import TransformersEngine
from testbed.fleets.local_run import write_run
from testbed.tiny_model import make_tiny_model

VOCABULARY = 151_936
ARMS: dict[str, dict[str, Any]] = {"base": {}, "adapters": {"lora": {"rank": 8}}}


async def join(model: Path, arm: str, where: Path) -> dict[str, float]:
    """Seconds from the start of the engine until it can generate."""
    section = {"path": str(model), "dtype": "bfloat16", **ARMS[arm]}
    config = load_config(write_run(where, model=section))
    engine = TransformersEngine(config, PromptTokenizer(config))
    began, used = time.perf_counter(), time.process_time()
    await engine.start()
    if config.model.lora is not None:
        adapters = {name: engine._table._by_name[name].clone() for name in engine._table.names}
        await engine.load_weights(0, adapters)
    seconds = {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - used}
    await engine.close()
    return seconds


def main() -> None:
    parser = runs.options("lora_join", __doc__, "lora_join")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    seconds: dict[str, dict[str, list[float]]] = {a: {"wall_s": [], "cpu_s": []} for a in ARMS}
    with tempfile.TemporaryDirectory() as scratch:
        model = make_tiny_model(Path(scratch) / "large", hidden=1024, layers=28)
        config = AutoConfig.from_pretrained(model, vocab_size=VOCABULARY)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(model)
        for number in range(args.repeats + 1):
            for arm in ARMS:
                found = asyncio.run(join(model, arm, Path(scratch)))
                print(json.dumps({"arm": arm, **found}), file=sys.stderr, flush=True)
                for name, value in found.items() if number else ():  # the first one warms up
                    seconds[arm][name].append(value)
    ratios = {
        n: median(seconds["adapters"][n]) / median(seconds["base"][n]) for n in ("wall_s", "cpu_s")
    }
    runs.write(args.out, {"machine": runs.machine(), "seconds": seconds, "ratios": ratios})


if __name__ == "__main__":
    main()
