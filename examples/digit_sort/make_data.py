"""Writes the digit-sort data: ``train.jsonl`` and ``held_out.jsonl``, disjoint, seeded.

A row asks for the digits between ``s`` and ``=`` in rising order:

    {"prompt": "s7391=", "answer": "1379"}

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
    rows = []
    while len(rows) < count:
        row = draw(rng)
        if row["prompt"] not in taken:
            taken.add(row["prompt"])
            rows.append(row)
    return rows


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=int, default=4096, help="rows to train on")
    parser.add_argument("--held-out", type=int, default=256, help="rows to evaluate on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE, help="directory to write to")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    taken: set[str] = set()
    # Held-out rows are drawn first, so that more training rows do not change them.
    held_out = draw_distinct(rng, args.held_out, taken)
    args.out.mkdir(parents=True, exist_ok=True)
    write(args.out / "held_out.jsonl", held_out)
    write(args.out / "train.jsonl", draw_distinct(rng, args.train, taken))


if __name__ == "__main__":
    main()
