"""Preferences between a model's own answers: for each prompt one that is right and one that is not.

Eight samples at temperature 1 are drawn for each prompt, with the rollout workers' own engine, and
a rule takes the place of the people who would compare them. Prompts that have no right or no wrong
sample are left out, and so are samples that did not end, because their text alone does not say so.

    python -m examples.rlhf.preferences --model runs/rlhf/sft/export \\
        --out runs/rlhf/preferences --pairs 8000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.digit_sort import make_data
from examples.rlhf.stages import FILES
from paceline.config.schema import Config
from paceline.prompt_tokenizer import PromptTokenizer
from rollout_worker.engine.base import Finish, Request, SamplingParams
from rollout_worker.engine.choice import make_engine

SAMPLES, MAX_TOKENS, AT_ONCE = 8, 24, 64
MOST_BATCHES_IN_VAIN = 50
"""A model that is always right, or always wrong, gives no pair."""
Row = dict[str, str]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="directory of the model")
    parser.add_argument("--out", type=Path, required=True, help=f"directory of {', '.join(FILES)}")
    parser.add_argument("--pairs", type=int, default=8000, help="pairs to train on")
    parser.add_argument("--held-out", type=int, default=512, help="pairs to evaluate on")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    wanted = args.pairs + args.held_out
    prompts = fresh_prompts(random.Random(f"pairs {args.seed}"), of_the_demo())

    def progress(found: int) -> None:
        print(f"{min(found, wanted)} of {wanted} pairs", flush=True)

    try:
        rows, _ = asyncio.run(own_pairs(args.model, prompts, wanted, args.seed, progress))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    args.out.mkdir(parents=True, exist_ok=True)
    # The file to train on comes last: if it is there, both are.
    write_rows(args.out / FILES[1], rows[: args.held_out])
    write_rows(args.out / FILES[0], rows[args.held_out :])
    return 0


async def own_pairs(
    model: Path,
    prompts: Iterator[Sequence[Row]],
    count: int,
    seed: int,
    progress: Callable[[int], None] = lambda found: None,
) -> tuple[list[Row], int]:
    """``count`` rows with prompt, chosen and rejected, and the number of samples that they took.

    ``prompts`` gives batches of rows with ``prompt`` and ``answer``. Raises ValueError if many of
    them in a row give no pair.
    """
    from transformers import AutoModelForCausalLM

    config = _config(model)
    tokenizer = PromptTokenizer(config)
    engine = make_engine(config, tokenizer)
    await engine.start()
    weights = AutoModelForCausalLM.from_pretrained(model).state_dict()
    await engine.load_weights(0, dict(weights))
    rows: list[Row] = []
    sampled = in_vain = 0
    for batch in prompts:
        requests = [
            Request(
                f"r{sampled}.{n}",
                tokenizer.prompt(row).tokens,
                SamplingParams(MAX_TOKENS, seed=seed * 1_000_003 + sampled + n),
                SAMPLES,
            )
            for n, row in enumerate(batch)
        ]
        groups = await asyncio.gather(*map(engine.generate, requests))
        sampled += len(batch) * SAMPLES
        before = len(rows)
        for row, group in zip(batch, groups, strict=True):
            ended = [s.tokens for s in group if s.finish is Finish.STOP]
            # A character is a token. A special token within an answer is left out of its text.
            texts = [(tokenizer.decode(tokens), len(tokens) - 1) for tokens in ended]
            whole = [text for text, length in texts if len(text) == length]
            wrong = [text for text in whole if text != row["answer"]]
            if row["answer"] in whole and wrong:
                rows.append(
                    {"prompt": row["prompt"], "chosen": row["answer"], "rejected": wrong[0]}
                )
        in_vain = 0 if len(rows) > before else in_vain + 1
        progress(len(rows))
        if len(rows) >= count:
            break
        if in_vain == MOST_BATCHES_IN_VAIN:
            await engine.close()
            raise ValueError(
                f"{model}: {in_vain * AT_ONCE} prompts in a row had no right and no wrong sample: "
                "there is nothing to prefer. Train the model a little more, or a little less"
            )
    await engine.close()
    return rows[:count], sampled


def fresh_prompts(rng: random.Random, taken: set[str]) -> Iterator[list[Row]]:
    """Batches of rows whose prompts are not in ``taken``, without end."""
    while True:
        yield make_data.draw_distinct(rng, AT_ONCE, taken)


def of_the_demo() -> set[str]:
    """Prompts of the demo's files."""
    files = (make_data.HERE / f"{name}.jsonl" for name in ("train", "held_out"))
    return {row["prompt"] for path in files for row in read_rows(path)}


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    partial.replace(path)
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _config(model: Path) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(model), "device": "cpu"},
            "data": {"path": "unused", "max_prompt_tokens": 16},
            "rollout": {"max_sequences": AT_ONCE * SAMPLES, "max_tokens": MAX_TOKENS},
            "fleet": {"rollout_threads": 1},
        }
    )


if __name__ == "__main__":
    raise SystemExit(main())
