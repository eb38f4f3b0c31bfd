"""Cost of a rollout worker's engine on vLLM: against plain vLLM, and against transformers
``generate``.

    python -m benchmarks.rollout [--rounds 9] [--out FILE]

Needs vLLM (``make bench`` installs it). 256 sequences a round (32 prompts of the digit-sort demo, 8
completions each), at most 24 new tokens, sampled at temperature 1, float32, one thread per process:

- bare: vLLM's own asynchronous engine, one request with n = 8 per prompt, only tokens;
- bare with log-probs: the same, with the log-probability of each token;
- engine: Paceline's engine on the same vLLM, as a worker uses it: log-probs and versions;
- engine, swaps: the same, with new weights loaded in the middle of every round;
- generate: transformers, all 256 as one static batch.

They take turns. Each ratio is of one round; the result is the median over rounds. Wall time, and
CPU seconds of all processes together; on a machine with other work only CPU seconds are meaningful.
The 0.1 M model is the demo's, whose completions are short; the others have random weights. With
models this small, nearly all time is vLLM's Python work per token. The costs of log-probs, of a
swap and of Paceline's own work are therefore at their largest, and shrink as the model grows. A
round has as many samples as a step of the demo, so a swap a round is a swap a step.
"""

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import asyncio
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM

from benchmarks import runs
from benchmarks.engine import (
    GROUP_SIZE,
    MAX_TOKENS,
    PROMPTS,
    SEQUENCES,
    SHAPES,
    Round,
    by_engine,
    by_generate,
    config_for,
    make_larger_model,
    prompts_of,
)
from benchmarks.runs import DEMO
from paceline.config.schema import Config
from paceline.prompt_tokenizer import PromptTokenizer
from rollout_worker.engine.base import Engine
from rollout_worker.engine.choice import make_engine
from rollout_worker.engine.vllm.engine import VLLMEngine

SLOTS = 256
_SWAP_AFTER_S = 0.05


def by_vllm(engine: VLLMEngine, prompts: list[Any], ends: list[int], logprobs: int | None) -> Round:
    """vLLM without Paceline, on the processes that the engine has started."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    llm = engine._client.llm

    async def ask(name: str, prompt: Any, seed: int) -> int:
        params = SamplingParams(
            n=GROUP_SIZE,
            max_tokens=MAX_TOKENS,
            temperature=1.0,
            seed=seed,
            stop_token_ids=ends,
            detokenize=False,
            logprobs=logprobs,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        async for output in llm.generate(tokens_input(prompt.tolist()), params, name):
            last = output
        return sum(len(completion.token_ids) for completion in last.outputs)

    async def one(seed: int) -> int:
        return sum(
            await asyncio.gather(
                *(
                    ask(f"b{logprobs}.{seed}.{number}", prompt, seed * PROMPTS + number)
                    for number, prompt in enumerate(prompts)
                )
            )
        )

    return one


def with_swaps(
    engine: Engine, round_: Round, weights: dict[str, Any], pauses: list[float]
) -> Round:
    async def one(seed: int) -> int:
        running = asyncio.create_task(round_(seed))
        await asyncio.sleep(_SWAP_AFTER_S)
        pauses.append(await engine.load_weights(engine.version + 1, weights))
        return await running

    return one


def cpu_s() -> float:
    """CPU seconds of this process and all below it, so far."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        times = process.cpu_times()
        total += times.user + times.system
    return total


async def measure(path: Path, rounds: int) -> dict[str, Any]:
    base = config_for(path, SLOTS)
    config = Config.model_validate(
        base.model_dump() | {"rollout": base.rollout.model_dump() | {"engine": "vllm"}}
    )
    tokenizer = PromptTokenizer(config)
    prompts = prompts_of(tokenizer)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    weights = dict(model.state_dict())
    engine = make_engine(config, tokenizer)
    assert isinstance(engine, VLLMEngine)
    begun = time.monotonic()
    await engine.start()
    started_s = time.monotonic() - begun
    await engine.load_weights(0, weights)
    # As a worker does by default, so that unfinished work survives it.
    engine.watch(config.rollout.partial_every_tokens, lambda request, samples: None)
    ends = list(tokenizer.end_tokens)
    pauses: list[float] = []
    ways: dict[str, Round] = {
        "bare": by_vllm(engine, prompts, ends, None),
        "bare with log-probs": by_vllm(engine, prompts, ends, 0),
        "engine": by_engine(engine, prompts),
        "engine, swaps": with_swaps(engine, by_engine(engine, prompts), weights, pauses),
        "generate": by_generate(model, prompts, set(ends)),
    }
    clock: dict[str, list[tuple[float, float, int]]] = {name: [] for name in ways}
    for number in range(-2, rounds):
        for place, (name, one) in enumerate(ways.items()):
            wall, cpu = time.perf_counter(), cpu_s()
            tokens = await one((number + 3) * len(ways) + place)
            if number >= 0:
                clock[name].append((time.perf_counter() - wall, cpu_s() - cpu, tokens))
    stage_s = engine.stats().stage_s
    await engine.close()
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "engine_start_s": started_s,
        "swap_pause_ms": median(pauses) * 1e3,
        "swap_stage_ms": stage_s * 1e3,
        "round_s": median(wall for wall, _, _ in clock["engine"]),
        "ways": {name: _rates(clock[name]) for name in ways},
        "ratios": {
            "worker to bare": _ratio(clock, "engine", "bare"),
            "worker to bare with log-probs": _ratio(clock, "engine", "bare with log-probs"),
            "log-probs": _ratio(clock, "bare with log-probs", "bare"),
            "swap every round": _ratio(clock, "engine, swaps", "engine"),
            "worker to transformers generate": _ratio(clock, "engine", "generate"),
        },
    }


def _rates(mine: list[tuple[float, float, int]]) -> dict[str, float]:
    return {
        "tokens_per_s": median(tokens / wall for wall, _, tokens in mine),
        "tokens_per_cpu_s": median(tokens / cpu for _, cpu, tokens in mine),
    }


def _ratio(
    clock: dict[str, list[tuple[float, float, int]]], mine: str, base: str
) -> dict[str, float]:
    """Ratio of tokens a second, by wall clock and by CPU seconds."""
    pairs = list(zip(clock[mine], clock[base], strict=True))
    return {
        "wall": median((m[2] / m[0]) / (b[2] / b[0]) for m, b in pairs),
        "cpu": median((m[2] / m[1]) / (b[2] / b[1]) for m, b in pairs),
    }


SIZES = ("0.1 M", *SHAPES)


def main() -> None:
    parser = runs.options("rollout", __doc__, "rollout")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        "machine": runs.machine(),
        "sequences": SEQUENCES,
        "max_new_tokens": MAX_TOKENS,
        "rounds": args.rounds,
        "models": {size: measured(size, args.rounds) for size in args.sizes},
    }
    runs.write(args.out, results)


def measured(size: str, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        path = DEMO / "model-0.1M"
        if size in SHAPES:
            path = make_larger_model(Path(directory), size)
        return asyncio.run(measure(path, rounds))


if __name__ == "__main__":
    main()
