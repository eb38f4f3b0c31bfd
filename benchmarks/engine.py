"""Cost of generation: the transformers engine against transformers' own ``generate``.

    python -m benchmarks.engine [--rounds 5] [--out FILE]

256 sequences (32 prompts of the digit-sort demo, 8 completions each), at most 24 new tokens,
sampled at temperature 1, one thread, float32. One process runs one model after the other:

- generate: all 256 as one static batch, prompts padded on the left, until the last has ended;
- engine, 256 slots: all at once as well, so the difference is the work per token;
- engine, 128 slots: continuous batching, as in a worker of the demo.

The three take turns. Each ratio is of times of one round; the result is the median over rounds.
Times are CPU seconds of the process, so that a busy machine does not distort them. ``generate``
returns only token ids; the engine returns each token's log-probability too. Tokens are counted up
to and including the end of the sequence, for all three. The 0.1 M model is trained and its
completions end after 4 to 13 tokens. The 0.8 M model has random weights, so nearly all lengths
occur.
"""

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks import runs
from benchmarks.runs import DEMO
from paceline.config.schema import Config
from paceline.prompt_tokenizer import PromptTokenizer
from rollout_worker.engine.base import Engine, Request, SamplingParams
from rollout_worker.engine.choice import make_engine

PROMPTS, GROUP_SIZE, MAX_TOKENS = 32, 8, 24
SEQUENCES = PROMPTS * GROUP_SIZE
SLOTS = (256, 128)

Round = Callable[[int], Coroutine[Any, Any, int]]
"""Generates the batch with this seed and returns how many tokens it has."""


# Width, inner width, layers, heads. 0.8 M is warm_start.py's.
SHAPES = {"0.8 M": (128, 320, 4, 4), "6 M": (256, 704, 8, 8)}


def make_larger_model(path: Path, size: str = "0.8 M") -> Path:
    """Random weights at a ``size`` of SHAPES, with the demo's architecture and tokenizer."""
    small = Qwen3Config.from_pretrained(DEMO / "model-0.1M")
    width, inner, layers, heads = SHAPES[size]
    shape = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 32,
        "layer_types": ["full_attention"] * layers,
    }
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**{**small.to_dict(), **shape})).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO / "model-0.1M" / name, path / name)
    return path


def config_for(model: Path, slots: int) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(model), "device": "cpu"},
            "data": {"path": "unused", "max_prompt_tokens": 16},
            "rollout": {"max_sequences": slots, "max_tokens": MAX_TOKENS},
            "fleet": {"rollout_threads": 1},
        }
    )


def prompts_of(tokenizer: PromptTokenizer) -> list[Any]:
    lines = (DEMO / "held_out.jsonl").read_text().splitlines()[:PROMPTS]
    return [tokenizer.prompt(json.loads(line)).tokens for line in lines]


def by_generate(model: PreTrainedModel, prompts: list[Any], end: set[int]) -> Round:
    longest = max(map(len, prompts))
    pad = model.generation_config.pad_token_id or 0
    ids = torch.full((PROMPTS, longest), pad)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.from_numpy(prompt).long()
        mask[row, longest - len(prompt) :] = 1
    ends = torch.tensor(sorted(end))

    async def one(seed: int) -> int:
        torch.manual_seed(seed)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=MAX_TOKENS,
                num_return_sequences=GROUP_SIZE,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                pad_token_id=pad,
                eos_token_id=sorted(end),
            )[:, longest:]
        ended = torch.isin(out, ends).long().cumsum(1)
        # Tokens before the first end, and that end where there is one.
        return int((ended == 0).sum() + (ended[:, -1] > 0).sum())

    return one


def by_engine(engine: Engine, prompts: list[Any]) -> Round:
    async def one(seed: int) -> int:
        groups = await asyncio.gather(
            *(
                engine.generate(
                    Request(
                        f"r{seed}.{number}",
                        prompt,
                        SamplingParams(MAX_TOKENS, seed=seed * PROMPTS + number),
                        GROUP_SIZE,
                    )
                )
                for number, prompt in enumerate(prompts)
            )
        )
        return sum(len(sample.tokens) for group in groups for sample in group)

    return one


async def measure(model_path: Path, rounds: int) -> dict[str, Any]:
    tokenizer = PromptTokenizer(config_for(model_path, SLOTS[0]))
    prompts = prompts_of(tokenizer)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    ways: dict[str, Round] = {"generate": by_generate(model, prompts, set(tokenizer.end_tokens))}
    engines = []
    for slots in SLOTS:
        engine = make_engine(config_for(model_path, slots), tokenizer)
        await engine.start()
        await engine.load_weights(0, dict(model.state_dict()))
        engines.append(engine)
        ways[f"engine, {slots} slots"] = by_engine(engine, prompts)
    clock: dict[str, list[tuple[float, int]]] = {name: [] for name in ways}
    for number in range(-2, rounds):
        for name, generate in ways.items():
            begun = time.process_time()
            tokens = await generate(number + 100)
            if number >= 0:
                clock[name].append((time.process_time() - begun, tokens))
    for engine in engines:
        await engine.close()
    parameters = sum(p.numel() for p in model.parameters())
    return {"parameters": parameters, "ways": {name: _rates(name, clock) for name in ways}}


def _rates(name: str, clock: dict[str, list[tuple[float, int]]]) -> dict[str, float]:
    mine, base = clock[name], clock["generate"]
    return {
        "samples_per_s": SEQUENCES / median(seconds for seconds, _ in mine),
        "tokens_per_s": median(tokens / seconds for seconds, tokens in mine),
        "tokens_a_sample": sum(tokens for _, tokens in mine) / len(mine) / SEQUENCES,
        "ratio_samples": median(b[0] / m[0] for m, b in zip(mine, base, strict=True)),
        "ratio_tokens": median(
            (m[1] / m[0]) / (b[1] / b[0]) for m, b in zip(mine, base, strict=True)
        ),
    }


def main() -> None:
    parser = runs.options("engine", __doc__, "engine")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        "sequences": SEQUENCES,
        "max_new_tokens": MAX_TOKENS,
        "threads": 1,
        "rounds": args.rounds,
        "clock": "CPU seconds of the process",
        "models": {},
    }
    with tempfile.TemporaryDirectory() as directory:
        models = {"0.1 M": DEMO / "model-0.1M", "0.8 M": make_larger_model(Path(directory))}
        for name, path in models.items():
            results["models"][name] = asyncio.run(measure(path, args.rounds))
    runs.write(args.out, results)


if __name__ == "__main__":
    main()
