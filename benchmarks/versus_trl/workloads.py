"""Workloads of ``benchmarks.versus_trl``: the demo's, and one whose answers are long-tailed.

Long-tailed: sorting again, of as many digits as a log-normal draw says (of prompts that differ, the
median is 7, one in twenty has more than 23, one in a hundred more than 41, and none more than 48),
where the demo draws 4 to 12 evenly. The model is the demo's, taught these lengths by a short
supervised run.
"""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import runs

MEDIAN, SPREAD, SHORTEST, LONGEST = 6, 0.8, 2, 48
TRAIN, HELD_OUT = 4096, 256
TAUGHT = 0.6
"""Exact match at which the supervised run stops, or after so many steps:"""
MOST_STEPS = 500
BATCH, LR = 64, 1e-3


@dataclass(frozen=True, slots=True)
class Workload:
    model: Path
    train: Path
    held_out: Path
    max_tokens: int

    def accuracy(self, model: Path) -> float:
        """Greedy exact match of ``model`` on the held-out rows."""
        rows = [json.loads(line) for line in self.held_out.read_text().splitlines()]
        return sum(runs.right_answers(model, rows, self.max_tokens)) / len(rows)


def demo(size: str) -> Workload:
    return Workload(
        runs.model_of(size), runs.DEMO / "train.jsonl", runs.DEMO / "held_out.jsonl", max_tokens=24
    )


def long_tailed(size: str) -> Workload:
    folder = runs.SCRATCH / "long-tailed"
    made = Workload(
        folder / f"model-{size}", folder / "train.jsonl", folder / "held_out.jsonl", max_tokens=64
    )
    if not made.held_out.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        rows = draw(random.Random("long-tailed"), TRAIN + HELD_OUT)
        write(made.train, rows[HELD_OUT:])
        write(made.held_out, rows[:HELD_OUT])
    if not (made.model / "tokenizer.json").is_file():
        teach(runs.model_of(size), made)
    return made


WORKLOADS = {"demo": demo, "long-tailed": long_tailed}


def draw(rng: random.Random, count: int) -> list[dict[str, str]]:
    """``count`` rows with prompts that differ."""
    rows: dict[str, str] = {}
    while len(rows) < count:
        length = round(rng.lognormvariate(math.log(MEDIAN), SPREAD))
        digits = rng.choices("0123456789", k=min(max(length, SHORTEST), LONGEST))
        rows[f"s{''.join(digits)}="] = "".join(sorted(digits))
    found = [{"prompt": prompt, "answer": answer} for prompt, answer in rows.items()]
    rng.shuffle(found)
    return found


def write(path: Path, rows: Sequence[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def teach(model_dir: Path, workload: Workload) -> None:
    """Supervised training of the model in ``model_dir`` on fresh rows, until enough are
    right."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(2)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="right")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    rng = random.Random("taught")
    for step in range(1, MOST_STEPS + 1):
        batch = supervised(tokenizer, draw(rng, BATCH))
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 and exact(model, supervised(tokenizer, draw(rng, 256))) >= TAUGHT:
            break
    print(f"{workload.model}: taught in {step} steps", flush=True)
    model.save_pretrained(workload.model)
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(workload.model)


def supervised(tokenizer: Any, rows: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Right-padded tokens of prompts and answers; labels of the answers alone."""
    texts = [row["prompt"] + row["answer"] + tokenizer.eos_token for row in rows]
    batch: dict[str, Any] = dict(tokenizer(texts, return_tensors="pt", padding=True))
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    for line, row in zip(labels, rows, strict=True):
        line[: len(row["prompt"])] = -100
    return batch | {"labels": labels}


def exact(model: Any, batch: dict[str, Any]) -> float:
    """Share of rows whose every token is the most likely one after those before it."""
    import torch

    with torch.no_grad():
        best = model(**batch).logits[:, :-1].argmax(-1)
    wanted = batch["labels"][:, 1:]
    return float(((best == wanted) | (wanted == -100)).all(1).float().mean())
