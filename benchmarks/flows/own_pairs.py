"""Preference pairs of the demo model's own samples: one right and one wrong answer to each prompt.

examples/rlhf/preferences.py draws them.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import runs
from examples.digit_sort.make_data import draw_distinct
from examples.rlhf.preferences import (
    Row,
    fresh_prompts,
    of_the_demo,
    own_pairs,
    read_rows,
    write_rows,
)

HELD_OUT = 512
"""Prompts of the accuracy, and pairs of the accuracy over pairs."""


def write_pairs(directory: Path, *, train: int, held_out: int, seed: int) -> dict[str, Any]:
    """Writes pairs.jsonl and held_out_pairs.jsonl unless they are there; their prompts are in no
    file of the demo.

    A row has ``prompt``, ``chosen`` and ``rejected``. Returns how many samples they took, and the
    seconds.
    """
    about = directory / "pairs.json"
    if about.is_file():
        found: dict[str, Any] = json.loads(about.read_text())
        return found
    directory.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    model, prompts = runs.model_of("0.1M"), _fresh_prompts(seed)
    rows, sampled = asyncio.run(own_pairs(model, prompts, train + held_out, seed))
    write_rows(directory / "held_out_pairs.jsonl", rows[:held_out])
    write_rows(directory / "pairs.jsonl", rows[held_out:])
    seconds = time.perf_counter() - begun
    result = {"pairs": train, "held_out": held_out, "samples": sampled, "seconds": seconds}
    about.write_text(json.dumps(result))
    return result


def write_labels(directory: Path) -> Path:
    """labels.jsonl: the completions of pairs.jsonl one by one, each with its ``label``."""
    rows = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in read_rows(directory / "pairs.jsonl")
        for side in ("chosen", "rejected")
    ]
    return write_rows(directory / "labels.jsonl", rows)


def unseen(count: int) -> list[Row]:
    """Prompts with their answers that no flow trains on, the same at every call."""
    return draw_distinct(random.Random("flows"), count, of_the_demo())


def _fresh_prompts(seed: int) -> Iterator[list[Row]]:
    taken = of_the_demo() | {row["prompt"] for row in unseen(HELD_OUT)}
    return fresh_prompts(random.Random(f"pairs {seed}"), taken)
