"""Writes the digit-sort data: ``train.jsonl`` and ``held_out.jsonl``, disjoint, seeded, and pairs
of both.

A row asks for the digits between ``s`` and ``=`` in rising order. A pair has a wrong answer beside
the right one: two neighbours are exchanged.

    {"prompt": "s7391=", "answer": "1379"}
    {"prompt": "s7391=", "chosen": "1379", "rejected": "3179"}

Run it again only to change the data; its result is checked in.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

HERE = Path(__file__).resolve().parent
SHORTEST, LONGEST = 4, 12


def draw(rng: random.Random) -> dict[str, str]:
    """One row: 4 to 12 digits, every length equally likely."""
    digits = rng.choices("0123456789", k=rng.randint(SHORTEST, LONGEST))
    return {"prompt": f"s{''.join(digits)}=", "answer": "".join(sorted(digits))}


def draw_distinct(rng: random.Random, count: int, taken: set[str]) -> list[dict[str, str]]:
    """``count`` rows whose prompts are not in ``taken``; adds them to it."""
    rows: list[dict[str, str]] = []
    while len(rows) < count:
        row = draw(rng)
        if row["prompt"] not in taken:
            taken.add(row["prompt"])
            rows.append(row)
    return rows


def pairs_of(rng: random.Random, rows: list[dict[str, str]], count: int) -> list[dict[str, str]]:
    """Pairs of the first ``count`` rows that have two digits that differ."""
    pairs: list[dict[str, str]] = []
    for row in rows:
        right = row["answer"]
        places = [i for i in range(len(right) - 1) if right[i] != right[i + 1]]
        if places and len(pairs) < count:
            i = rng.choice(places)
            wrong = right[:i] + right[i + 1] + right[i] + right[i + 2 :]
            pairs.append({"prompt": row["prompt"], "chosen": right, "rejected": wrong})
    return pairs


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=int, default=4096, help="rows to train on")
    parser.add_argument("--held-out", type=int, default=256, help="rows to evaluate on")
    parser.add_argument("--pairs", type=int, default=1024, help="pairs to train on")
    parser.add_argument("--held-out-pairs", type=int, default=128, help="pairs to evaluate on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE, help="directory to write to")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    taken: set[str] = set()
    # Held-out rows are drawn first, so that more training rows do not change them.
    held_out = draw_distinct(rng, args.held_out, taken)
    args.out.mkdir(parents=True, exist_ok=True)
    write(args.out / "held_out.jsonl", held_out)
    train = draw_distinct(rng, args.train, taken)
    write(args.out / "train.jsonl", train)
    write(args.out / "held_out_pairs.jsonl", pairs_of(rng, held_out, args.held_out_pairs))
    write(args.out / "pairs.jsonl", pairs_of(rng, train, args.pairs))


if __name__ == "__main__":
    main()
