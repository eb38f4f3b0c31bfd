"""Writes ``guess_number.jsonl``: prompts of a guessing game over ranges of several sizes, seeded.

    {"prompt": "I think of a whole number from 1 to 100. ...", "low": 1, "high": 100}

Run it again only to change the data; its result is checked in.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROWS = 512
SIZES = (10, 20, 50, 100, 200)
PROMPT = (
    "I think of a whole number from {low} to {high}. Guess it. After each guess I say whether my "
    "number is higher or lower. Answer with your guess only."
)


def main() -> None:
    rng = random.Random(0)
    rows = []
    for _ in range(ROWS):
        low = rng.randint(1, 100)
        high = low + rng.choice(SIZES) - 1
        rows.append({"prompt": PROMPT.format(low=low, high=high), "low": low, "high": high})
    path = HERE / "guess_number.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
